"""Cross-task pre-training by the real commands: stage 1 on single images, stage 2 with labelled images, captioning; two ranks."""

from pathlib import Path

import pytest
import torch
from tests.commands import command, in_process, weights
from tests.stages.small_runs import TINY
from tests.toy import write_toy, write_toy_labelled, write_toy_singles

SMALL = (
    *TINY,
    *("--model.captioner.init_args.dropout=0", "--data.batch_size=7", "--data.max_length=20", "--data.features=toy"),
    *("--model.lr=1e-3", "--trainer.max_steps=14", "--trainer.val_check_interval=7", "--trainer.accelerator=cpu"),
    "--trainer.log_every_n_steps=1",
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cross")
    for name, write in (("pairs", write_toy), ("cub", write_toy_singles), ("nabirds", write_toy_labelled)):
        write(folder / name)
    return folder


def first(place: Path, *options: str) -> list[str]:
    files = f"--data.folder={place / 'cub'}", f"--run.out={place / 'pretrain-cub'}"
    return command("pretrain", [], *SMALL, *files, f"--data.vocabulary_with=[{place / 'pairs'}]", *options)


def second(place: Path, out: str, *options: str) -> list[str]:
    files = f"--data.folder={place / 'pairs'}", f"--run.out={place / out}", f"--data.labelled={place / 'nabirds'}"
    more = f"--data.vocabulary_with=[{place / 'cub'}]", "--model.warmup=3"
    return command("pretrain", [], *SMALL, *files, *more, *options)


@pytest.mark.slow
def test_two_stages_and_captioning(place: Path) -> None:
    assert in_process(first(place, "--model.warmup=3")) is None
    begin = f"--model.init_from={place / 'pretrain-cub/last.ckpt'}"
    assert in_process(second(place, "pretrain", begin, "--data.tasks={mlm: 1, mvcl: 1, fda: 1, fgvc: 3}")) is None
    one, two = (torch.load(place / stage / "last.ckpt", weights_only=True) for stage in ("pretrain-cub", "pretrain"))
    assert one["diffcap"]["words"] == two["diffcap"]["words"] and "bird" in one["diffcap"]["words"]
    assert one["global_step"] == two["global_step"] == 14  # counted anew
    assert one["lr_schedulers"][0]["last_epoch"] == two["lr_schedulers"][0]["last_epoch"] == 14
    heads = {name for name in two["state_dict"] if name not in one["state_dict"]}
    assert heads == {f"captioner.{head}.{part}" for head in ("classifier", "matcher") for part in ("weight", "bias")}
    assert two["state_dict"]["captioner.classifier.weight"].shape == (3, 16)  # the data know how many classes there are
    logs = (place / "pretrain/logs/version_0/metrics.csv").read_text().splitlines()[0]
    assert all(f"train/{name}" in logs for name in ("fgvc", "fgvc_matching", "fgvc_contrast", "fgvc_classification"))

    # What stage 2 begins with is what stage 1 ended with.
    assert in_process(second(place, "still", begin, "--data.tasks={fgvc: 1}", "--model.lr=0")) is None
    kept, ended = weights(place / "still/last.ckpt"), one["state_dict"]
    assert all(torch.equal(value, kept[name]) for name, value in ended.items())

    options = f"--data.folder={place / 'pairs'}", f"--run.out={place / 'finetune'}", "--run.monitor=val/BLEU-1"
    begin = f"--model.init_from={place / 'pretrain/last.ckpt'}"
    words = command("finetune", [], *SMALL, "--model.tokenizer=raw", *options, begin)
    output = str(in_process(words))
    assert "vocabulary has" in output and "data.vocabulary_with" in output and "\n" not in output
    words.append(f"--data.vocabulary_with=[{place / 'cub'}]")
    assert in_process(words) is None

    # A part that is left out begins anew, the others with what stage 2 ended with.
    anew = "--model.init_without=[trunk.pair_encoder]", "--model.lr=0", f"--run.out={place / 'anew'}"
    assert in_process([*words, *anew]) is None
    started = weights(place / "anew/last.ckpt")
    names = [name for name, value in started.items() if value.ndim > 1 and name in two["state_dict"]]
    assert {".trunk.pair_encoder." in name for name in names} == {True, False}
    for name in names:
        assert torch.equal(started[name], two["state_dict"][name]) == (".trunk.pair_encoder." not in name), name
