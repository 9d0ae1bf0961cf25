"""Cross-task pre-training by the real commands: stage 1 on single images, stage 2 with labelled images, captioning; two ranks."""

import subprocess
from pathlib import Path

import pytest
import torch
from tests.commands import command, environment, in_process, same_logs, weights
from tests.toy import write_toy, write_toy_labelled, write_toy_singles

SMALL = (
    *(
        "--model.captioner.init_args.width=16",
        "--model.captioner.init_args.heads=2",
        "--model.captioner.init_args.ffn=24",
    ),
    *("--model.captioner.init_args.dropout=0", "--data.batch_size=7", "--data.max_length=20", "--data.features=toy"),
    *("--model.lr=1e-3", "--trainer.max_steps=14", "--trainer.val_check_interval=7", "--trainer.accelerator=cpu"),
    "--trainer.log_every_n_steps=1",
)
ALL = "--data.tasks={mlm: 1, single_mlm: 1, single_mvcl: 1, single_fda: 1, fgvc: 2}"


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
    output = in_process(words)
    assert (
        isinstance(output, str)
        and "vocabulary has" in output
        and "data.vocabulary_with" in output
        and "\n" not in output
    )
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


@pytest.mark.thorough
def test_two_processes_train_to_the_weights_of_one(place: Path) -> None:
    """Every task on single and on labelled images; 7 labelled pairs are 4 and 3 on two ranks."""
    processes = []
    for devices in (1, 2):
        more = ["--trainer.strategy=ddp"] if devices > 1 else []
        options = ALL, f"--data.singles={place / 'cub'}", f"--trainer.devices={devices}", "--data.val_limit=7", *more
        words = second(place, f"ranks{devices}", *options)
        processes.append(
            subprocess.Popen(words, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    for process in processes:
        output = process.communicate(timeout=400)
        assert process.returncode == 0, output
    one, two = (weights(place / f"ranks{devices}/last.ckpt") for devices in (1, 2))
    for name, value in one.items():
        other = two[name]
        if name.endswith("qkv.bias"):  # see tests/lit/test_distributed.py
            value, other = (torch.stack([part for n, part in enumerate(v.chunk(3)) if n != 1]) for v in (value, other))
        torch.testing.assert_close(value, other, atol=1e-5, rtol=0, msg=lambda output, name=name: f"{name}: {output}")
    assert {"train/single_fda", "train/fgvc_contrast", "val/mlm"} <= same_logs(place / "ranks1", place / "ranks2")
    for name in ("classifier.bias", "matcher.bias", "trunk.image_projection.bias"):
        start = torch.zeros(()) if name.startswith("trunk") else None
        assert start is None or one[f"captioner.{name}"].abs().max() > 1e-3
