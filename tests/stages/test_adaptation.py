"""CLIP4IDC by the real commands: adaptation, captioning from it, two processes against one, a kill, what does not fit."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.commands import ROOT, config_words, in_process, logged, one_sentence, part, run, weights
from tests.evaluation.test_retrieval import naive
from tests.stages.small_runs import evaluation, kill_when, same_training

from diffcap.checkpoints.loading import build_pretraining, load
from diffcap.checkpoints.reading import read_checkpoint
from diffcap.data.pair_table import PairTable, RetrievalDataset
from diffcap.features.store import FeatureStore
from diffcap.records import read_dataset
from diffcap.run_folder import stage_of
from diffcap.text.vocabularies import restore_vocabulary

SMALL = (
    *("--data.batch_size=6", "--data.features=blocks_pixels", "--trainer.accelerator=cpu"),
    *("--trainer.max_steps=20", "--trainer.val_check_interval=10", "--trainer.log_every_n_steps=1"),
    "--run.checkpoint_every=4",
)


def words(stage: str, folder: Path, out: Path, *options: str, ablation: str | None = None) -> list[str]:
    named = config_words(
        "configs/trainer/default.yaml",
        part("clip4idc", stage),
        "configs/dataset/blocks.yaml",
        part("clip4idc", stage, "blocks"),
        *([part("clip4idc", stage, ablation=ablation)] if ablation else []),
    )
    script = str(ROOT / "stages" / f"{stage}.py")
    return [sys.executable, script, *named, *SMALL, f"--data.folder={folder}", f"--run.out={out}", *options]


def curve(out: Path) -> list[float]:
    """The loss of every step."""
    return [value for (_, name), value in logged(out).items() if name == "train/contrast"]


@pytest.fixture(scope="module")
def adapted(pixels: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adaptation of 20 steps on one process."""
    out = tmp_path_factory.mktemp("adapted") / "pretrain"
    assert in_process(words("pretrain", pixels, out)) is None
    return out


@pytest.mark.thorough
def test_two_processes_repeat_the_loss_curve_of_one(pixels: Path, tmp_path: Path) -> None:
    """From random weights, at a low rate: trained ones' larger losses, and the blocks settings' rates, blow rounding up."""
    slow = "--model.lr=1e-4", "--model.clip_lr=1e-4", "--model.initial_weights=random"
    assert in_process(words("pretrain", pixels, tmp_path / "one", *slow)) is None
    ddp = "--trainer.devices=2", "--trainer.strategy=ddp"
    done = run(words("pretrain", pixels, tmp_path / "two", *slow, *ddp), tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    one, two = curve(tmp_path / "one"), curve(tmp_path / "two")
    assert len(one) == len(two) == 20 and max(one) - min(one) > 0.01
    assert max(abs(a - b) for a, b in zip(one, two)) < 1e-5
    scores = [json.loads((tmp_path / out / "finished.json").read_text())["best"] for out in ("one", "two")]
    assert scores[0] == pytest.approx(scores[1])


@pytest.mark.thorough
def test_a_killed_adaptation_ends_as_an_undisturbed_one(pixels: Path, adapted: Path, tmp_path: Path) -> None:
    command = words("pretrain", pixels, tmp_path / "pretrain")
    kill_when(command, tmp_path / "pretrain/last.ckpt", tmp_path)
    assert in_process(command) is None
    for name in ("last.ckpt", "best.ckpt"):
        same_training(tmp_path / "pretrain" / name, adapted / name)


def test_captioning_takes_the_adaptation_over(pixels: Path, adapted: Path, tmp_path: Path) -> None:
    start = f"--model.init_from={adapted / 'best.ckpt'}"
    rates = "--model.lr=0", "--model.pretrained_lr=0", "--trainer.max_steps=1", "--trainer.val_check_interval=1"
    out = tmp_path / "run/finetune"
    assert in_process(words("finetune", pixels, out, start, *rates)) is None
    ours, theirs = weights(out / "last.ckpt"), weights(adapted / "best.ckpt")
    shared = ours.keys() & theirs.keys()
    assert {"captioner.images.joint_positions", "captioner.words.token_embedding.weight"} <= shared
    assert all(torch.equal(ours[name], theirs[name]) for name in shared)
    assert not [name for name in theirs.keys() - ours.keys() if name.startswith("captioner.images")]
    assert in_process(evaluation(pixels, tmp_path / "run")) is None
    assert {"total", "semantic"} <= json.loads((tmp_path / "run/eval/metrics.json").read_text())["groups"].keys()
    assert load(out / "best.ckpt").vocabulary.decode([0, 1, 2])
    assert [stage_of(folder) for folder in (adapted, out)] == ["pretrain", "finetune"]  # which can repeat them


@pytest.mark.thorough
def test_what_does_not_fit_is_one_sentence(pixels: Path, adapted: Path, tmp_path: Path) -> None:
    def output(*options: str, stage: str = "pretrain") -> str:
        return one_sentence(run(words(stage, pixels, tmp_path / "x", *options), tmp_path))

    other = "--model.captioner.init_args.network=ViT-S-32", "--model.captioner.init_args.image_size=[96,128]"
    assert "open_clip has no weights for ViT-S-32; give a file as WEIGHTS=PATH" in output(*other)
    assert "no weights file there; check the path given as WEIGHTS" in output("--model.clip_weights=missing.pt")
    assert "data.vocabulary_layout is pcl; CLIP4IDC needs clip" in output("--data.vocabulary_layout=pcl")
    start, fewer = f"--model.init_from={adapted / 'best.ckpt'}", "--model.captioner.init_args.intra_layers=3"
    assert "the checkpoint has intra_layers 2, this stage has 3" in output(start, fewer, stage="finetune")
    apart = "--model.captioner.init_args.images=apart"
    assert "parameters do not fit" in output(start, apart, stage="finetune")
    assert not (tmp_path / "x/finished.json").exists()


def test_the_released_optimizer_keeps_clip_in_half_precision_and_both_stages_log_their_gradients(
    pixels: Path, tmp_path: Path
) -> None:
    released = "--model.optimizer=diffcap.methods.clip4idc.optimizers.bert_adam"
    half = released, "--trainer.max_steps=2", "--trainer.val_check_interval=2"
    assert in_process(words("pretrain", pixels, tmp_path / "pretrain", *half)) is None
    start = f"--model.init_from={tmp_path / 'pretrain/best.ckpt'}"
    assert in_process(words("finetune", pixels, tmp_path / "finetune", *half, start)) is None
    for stage, name in (("pretrain", "added"), ("finetune", "captioner")):
        state = weights(tmp_path / stage / "last.ckpt")
        linear = [value for key, value in state.items() if "resblocks" in key and "ln_" not in key]
        assert len(linear) > 20 and all(torch.equal(value, value.half().float()) for value in linear)
        others = [value for key, value in state.items() if key.endswith(("joint_positions", "ln_mid.weight"))]
        assert any(not torch.equal(value, value.half().float()) for value in others)
        found = {key for _, key in logged(tmp_path / stage)}
        clip = "clip" if stage == "pretrain" else "pretrained"
        assert {f"train/gradient_rms_{clip}", f"train/gradient_rms_{name}"} <= found
        for (_, key), value in logged(tmp_path / stage).items():
            assert not key.startswith("train/gradient_rms") or 0 < value < 1


def retrieval(folder: Path, checkpoint: Path, out: Path, *options: str) -> list[str]:
    files = f"--checkpoint={checkpoint}", f"--out={out}", f"--folder={folder}", "--accelerator=cpu"
    return [sys.executable, str(ROOT / "stages/evaluate.py"), "--task=retrieval", *files, *options]


@pytest.fixture(scope="module")
def retrieved(pixels: Path, adapted: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """metrics.json of the retrieval on the test split."""
    out = tmp_path_factory.mktemp("retrieved")
    assert in_process(retrieval(pixels, adapted / "best.ckpt", out)) is None
    return json.loads((out / "metrics.json").read_text())


def test_retrieval_on_the_test_split_is_that_of_a_loop_over_its_change_pairs(
    pixels: Path, adapted: Path, retrieved: dict[str, Any]
) -> None:
    state = read_checkpoint(adapted / "best.ckpt")
    model, metadata = build_pretraining(state).eval(), state["diffcap"]
    vocabulary = restore_vocabulary(metadata["words"], metadata["vocabulary_layout"])
    pairs = [pair for pair in read_dataset(pixels).pairs if pair.split == "test" and not pair.is_distractor]
    table = PairTable(pairs, FeatureStore.open(pixels / "features/blocks_pixels"), vocabulary, 32)
    batch = RetrievalDataset(table).__getitems__(list(range(len(pairs))))
    with torch.no_grad():
        of_pairs = model.encode_pairs(batch["before"], batch["after"])
        of_texts = model.words(batch["texts"])
    expected = naive(of_pairs, of_texts, batch["text_pair_number"].tolist(), "pairs")
    assert {name: retrieved["retrieval"][name] for name in expected} == pytest.approx(expected)
    protocol = retrieved["protocol"]
    assert (protocol["pairs"], protocol["captions"]) == (len(pairs), len(batch["texts"]))
    assert protocol["split"] == "test" and protocol["pair_to_text"] == "pairs"
    assert retrieved["provenance"]["checkpoints"]


@pytest.mark.thorough
def test_two_processes_retrieve_as_one(pixels: Path, adapted: Path, retrieved: dict[str, Any], tmp_path: Path) -> None:
    done = run(retrieval(pixels, adapted / "best.ckpt", tmp_path, "--devices=2", "--batch_size=4"), tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "metrics.json").read_text())
    assert found["retrieval"] == pytest.approx(retrieved["retrieval"])


def test_what_cannot_retrieve_is_one_sentence(pixels: Path, adapted: Path, tmp_path: Path) -> None:
    for options, message in ((["--beams=3"], "--beams has no effect on retrieval"), (["--limit=0"], "--limit is 0")):
        assert message in str(in_process(retrieval(pixels, adapted / "best.ckpt", tmp_path, *options)))
    finetuned, short = tmp_path / "finetune", ("--trainer.max_steps=1", "--trainer.val_check_interval=1")
    assert in_process(words("finetune", pixels, finetuned, *short)) is None
    assert "not a checkpoint of a pre-training that learns retrieval" in str(
        in_process(retrieval(pixels, finetuned / "last.ckpt", tmp_path / "out"))
    )
