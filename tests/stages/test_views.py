"""SCORER and DIRL by the real commands: smoke settings, scoring, a kill, two processes against one; all ablations' settings."""

from pathlib import Path

import pytest
from tests.commands import command, config_words, in_process, one_sentence, part, part_settings, run, weights

from diffcap.methods.pcl.data import CAPTIONED
from diffcap.registry import import_object, methods

METHODS = ("scorer", "dirl")
# Dropout and swapping on: their draws are what a resumed run could get wrong.
SMALL = (
    *(f"--model.captioner.init_args.{key}" for key in ("width=16", "heads=2", "word_width=12", "dropout=0.2")),
    *("--data.batch_size=5", "--data.features=blocks", "--trainer.accelerator=cpu", "--trainer.limit_val_batches=1"),
    *("--trainer.max_steps=60", "--trainer.val_check_interval=20", "--run.checkpoint_every=4", "--model.warmup=5"),
)


def finetune(method: str, folder: Path, out: Path, *options: str) -> list[str]:
    files = "configs/dataset/blocks.yaml", part(method, "finetune", "blocks")
    return command("finetune", files, *SMALL, f"--data.folder={folder}", f"--run.out={out}", *options, method=method)


ABLATIONS = [
    (known.name, stage, name)
    for known in methods().values()
    for name in known.ablation_names
    for stage in ("pretrain", "finetune")
    if not known.base_model and known.named("ablations", name, stage)
]


@pytest.mark.parametrize(("method", "stage", "name"), ABLATIONS, ids="-".join)
def test_an_ablations_settings_build_a_model(method: str, stage: str, name: str) -> None:
    settings = part_settings(method, stage, ablation=name)
    if stage == "pretrain" and "data" in settings:  # some differ in their tasks alone
        assert set(settings["data"]["without"]) < set(CAPTIONED)
    # The row that is the whole method by default need not name a part of it.
    given = settings.get("model", {}).get("captioner", {"init_args": {}})["init_args"]
    assert settings
    base = part_settings(method, "finetune")["model"]["captioner"]["init_args"]
    small = {"network": "ViT-blocks-16", "intra_layers": 3} if method == "clip4idc" else {"feature_channels": 3}
    model = import_object(methods()[method].captioner)(
        **{**base, "width": 16, "heads": 2, "vocabulary_size": 9, **small, **given}
    )
    assert all(model.hyperparameters[key] == value for key, value in given.items())


def test_a_baseline_trains_by_its_ablations_file(blocks: Path, tmp_path: Path) -> None:
    for method, row, absent in (("scorer", "subtraction", "encoder"), ("dirl", "transformer", "projector")):
        words = finetune(method, blocks, tmp_path / row, "--trainer.max_steps=2", "--trainer.val_check_interval=2")
        place = words.index(SMALL[0])
        words[place:place] = config_words(part(method, "finetune", ablation=row))
        assert in_process(words) is None
        assert not [name for name in weights(tmp_path / row / "last.ckpt") if name.startswith(f"captioner.{absent}")]


def test_the_wrong_words_are_one_sentence_and_long_captions_are_cut(blocks: Path, tmp_path: Path) -> None:
    done = run(finetune("scorer", blocks, tmp_path / "x", "--data.vocabulary_layout=pcl"), tmp_path)
    assert "data.vocabulary_layout is pcl; SCORER needs rcc" in one_sentence(done)
    done = run(finetune("scorer", blocks, tmp_path / "y", "--data.max_length=9"), tmp_path)
    assert done.returncode == 0, done.stderr  # longer captions are cut
