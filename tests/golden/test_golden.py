"""The first ten losses of every method and training stage, and five captions each, as `golden.json` holds them.

A change of structure must leave them as they are. `pytest tests/golden --write-golden` writes the file again, for a change
that is meant to change numbers; its commit says why.
"""

import csv
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tests.commands import ROOT, config_words, in_process, part
from tests.toy import write_toy, write_toy_labelled, write_toy_singles

from diffcap.checkpoints.loading import load
from diffcap.features.store import FeatureStore
from diffcap.features.writer import StoreWriter
from diffcap.lit.decoding import decode
from diffcap.models.generation import greedy
from diffcap.records import read_dataset

GOLDEN = Path(__file__).with_name("golden.json")
STEPS = 10
WORDS_AFTER = 80  # steps of fine-tuning, after which captions are sentences that differ between pairs
CAPTIONED = ("pcl/finetune", "pcl/reinforce", "scorer/finetune", "scorer/reinforce", "dirl/finetune", "dirl/reinforce")
# Captions after STEPS steps. Processors differ in logits that are almost equal, so each word's lead over the second word is
# compared as a number, and a caption only if all leads of its words exceed LEAD.
CAPTIONED_EARLY = ("clip4idc/finetune", "clip4idc/reinforce")
LEAD = 0.01
TOLERANCE = 1e-4  # relative and absolute; processors round differently, and ten steps pass it on
# Rewards are scores of sampled captions. On another kind of processor than that of the file, a sampled word can differ, and
# everything after the first step with it.
PROCESSOR = "AVX512"
REWARD_TOLERANCE = 0.02
COMMON = (
    *("--trainer.accelerator=cpu", "--trainer.log_every_n_steps=1", "--trainer.val_check_interval=1000"),
    *("--run.checkpoint_every=10", "--run.patience=null", "--run.select_after=0", "--seed_everything=1"),
    *("--data.seed=1", "--data.batch_size=8", "--model.warmup=0", "--model.schedule=constant"),
)
TRUNK = ("width=16", "heads=2", "ffn=24", "dropout=0.1")
SCORER = ("width=16", "heads=2", "word_width=12", "dropout=0.1", "decoder_std=0.3", "position_std=0.3")
DIRL = ("width=16", "heads=2", "ffn=24", "word_width=12", "projector_width=24", "dropout=0.1")
CLIP = ("network=ViT-blocks-16", "intra_layers=2", "pair_init=difference", "freeze_embeddings=false")
CLIP_WORDS = ("width=32", "heads=2", "ffn=64", "encoder_layers=1", "decoder_layers=1", "dropout=0.1", "init_std=0.2")


class Run(NamedTuple):
    """One training: its script, settings files under configs/, sizes of the captioner, other options, and what it begins with."""

    script: str
    files: tuple[str | Path, ...]
    sizes: tuple[str, ...]
    options: tuple[str, ...] = ()
    start: str | None = None


def reinforced(method: str, sizes: tuple[str, ...], options: tuple[str, ...]) -> Run:
    files = part(method, "finetune"), "configs/reinforce/base.yaml"
    return Run("reinforce", files, sizes, (*options, "--data.batch_size=4"), f"{method}/finetune/last.ckpt")


_PCL = ("--model.lr=5e-3", "--data.features=toy", "--data.max_length=16")
_GRID = (*_PCL, "--data.samples=scenes")
_MIXED = (*_PCL, "--data.singles={singles}", "--data.labelled={labelled}", "--data.vocabulary_with=[{singles}]")
_CLIP = ("--data.features=pixels", "--data.vocabulary_layout=clip_used", "--data.max_length=20")
_CAPTIONING = (*_CLIP, "--data.samples=scenes", "--model.tokenizer=raw")
RUNS = {
    "pcl/pretrain": Run("pretrain", (part("pcl", "pretrain"),), TRUNK, _PCL),
    "pcl/pretrain-mixed": Run("pretrain", (part("pcl", "pretrain"), part("pcl", "pretrain", "mixed")), TRUNK, _MIXED),
    "pcl/pretrain-cub": Run(
        "pretrain", (part("pcl", "pretrain"), part("pcl", "pretrain", "cub")), TRUNK, (*_PCL, "--data.folder={singles}")
    ),
    "pcl/finetune": Run("finetune", (part("pcl", "finetune"),), TRUNK, _PCL, "pcl/pretrain/last.ckpt"),
    "pcl/reinforce": reinforced("pcl", TRUNK, _PCL),
    "scorer/finetune": Run("finetune", (part("scorer", "finetune"),), SCORER, _GRID),
    "scorer/reinforce": reinforced("scorer", SCORER, _GRID),
    "dirl/finetune": Run("finetune", (part("dirl", "finetune"),), DIRL, _GRID),
    "dirl/reinforce": reinforced("dirl", DIRL, _GRID),
    "clip4idc/pretrain": Run(
        "pretrain", (part("clip4idc", "pretrain"),), CLIP, (*_CLIP, "--model.lr=1e-4", "--model.clip_lr=1e-4")
    ),
    "clip4idc/finetune": Run(
        "finetune",
        (part("clip4idc", "finetune"),),
        (*CLIP, *CLIP_WORDS),
        (*_CAPTIONING, "--model.lr=5e-3", "--model.pretrained_lr=1e-4", "--model.warmup=40"),
        "clip4idc/pretrain/best.ckpt",
    ),
    "clip4idc/reinforce": reinforced("clip4idc", (*CLIP, *CLIP_WORDS), (*_CAPTIONING, "--model.pretrained_lr=1e-6")),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The toy datasets, with pixels of whole numbers that are the same on every machine."""
    base = tmp_path_factory.mktemp("golden")
    toy = write_toy(base / "toy", scenes=8)
    paths = list(dict.fromkeys(path for pair in read_dataset(toy).pairs for path in pair.images))
    store = StoreWriter(toy / "features/pixels", paths, (3, 96, 128), {"dtype": "uint8"})
    noise = np.random.default_rng(2).integers(0, 256, (len(paths), 3, 12, 16), dtype=np.uint8)
    store.write(np.arange(len(paths)), noise.repeat(8, 2).repeat(8, 3))
    store.finish()
    singles, labelled = write_toy_singles(base / "singles"), write_toy_labelled(base / "labelled")
    return {"toy": toy, "singles": singles, "labelled": labelled, "runs": base / "runs"}


def words(name: str, folders: dict[str, Path]) -> list[str]:
    run = RUNS[name]
    files = config_words("configs/trainer/default.yaml", *run.files)
    sizes = [f"--model.captioner.init_args.{size}" for size in run.sizes]
    places = [f"--data.folder={folders['toy']}", f"--run.out={folders['runs'] / name}"]
    start = [f"--model.init_from={folders['runs'] / run.start}"] if run.start else []
    options = [option.format(**folders) for option in run.options]
    steps = f"--trainer.max_steps={WORDS_AFTER if name in CAPTIONED and run.script == 'finetune' else STEPS}"
    return [
        *(sys.executable, str(ROOT / f"stages/{run.script}.py"), *files, *sizes),
        *(*COMMON, *places, *start, steps, *options),
    ]


def losses(out: Path) -> list[dict[str, float]]:
    """Every logged value of each training step, but for rates, times and gradients."""
    with next(out.glob("logs/*/metrics.csv")).open() as file:
        rows = [{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(file)]
    rows = [{key: value for key, value in row.items() if not key.startswith("train/gradient_rms")} for row in rows]
    steps = [kept for row in rows if (kept := {key: row[key] for key in row if key.startswith("train/")})]
    return steps[:STEPS]


def five_captions(out: Path, folders: dict[str, Path]) -> dict[str, str]:
    """Captions of five training pairs by the last weights."""
    checkpoint = load(out / "last.ckpt")
    pairs = [pair for pair in read_dataset(folders["toy"]).pairs if pair.split == "train"][:5]
    store = folders["toy"] / "features" / checkpoint.features["name"]
    decoded = decode(checkpoint, pairs, store, accelerator="cpu")
    return decoded.captions if decoded else {}


@torch.no_grad()
def smallest_leads(out: Path, folders: dict[str, Path]) -> dict[str, float]:
    """For each caption of `five_captions`, the smallest difference between the two largest logits of a word or its end."""
    checkpoint = load(out / "last.ckpt")
    captioner = checkpoint.captioner.eval()
    pairs = [pair for pair in read_dataset(folders["toy"]).pairs if pair.split == "train"][:5]
    store = FeatureStore.open(folders["toy"] / "features" / checkpoint.features["name"])
    sides = [[pair.before for pair in pairs], [pair.after for pair in pairs]]
    before, after = (torch.from_numpy(store.read(store.rows(paths))) for paths in sides)
    memory = captioner.encode(before, after)
    tokens = greedy(captioner, memory, checkpoint.max_length)
    first, second = captioner.teacher_forced_logits(tokens, memory).topk(2, -1).values.unbind(-1)  # (B, T - 1) each
    leads = (first - second).masked_fill(~captioner.caption_mask(tokens), torch.inf).amin(1)
    return dict(zip([pair.id for pair in pairs], leads.tolist()))


@pytest.fixture(scope="module")
def found(folders: dict[str, Path]) -> dict[str, Any]:
    """What every run gives today, in the form of the file."""
    results: dict[str, Any] = {}
    for name in RUNS:
        assert not in_process(words(name, folders)), name
        out = folders["runs"] / name
        results[name] = {"losses": losses(out)}
        if name in CAPTIONED:
            results[name]["captions"] = five_captions(out, folders)
        if name in CAPTIONED_EARLY:
            results[name] |= {"captions": five_captions(out, folders), "leads": smallest_leads(out, folders)}
    return results


@pytest.fixture(scope="module")
def golden(found: dict[str, Any], request: pytest.FixtureRequest) -> dict[str, Any]:
    if request.config.getoption("--write-golden"):
        GOLDEN.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return json.loads(GOLDEN.read_text(encoding="utf-8"))


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_first_losses_and_captions_are_the_golden_ones(
    name: str, found: dict[str, Any], golden: dict[str, Any]
) -> None:
    ours, theirs = found[name], golden[name]
    assert len(theirs["losses"]) == STEPS == len(ours["losses"])
    if RUNS[name].script == "reinforce" and torch.backends.cpu.get_cpu_capability() != PROCESSOR:
        assert ours["losses"][0] == pytest.approx(theirs["losses"][0], rel=REWARD_TOLERANCE)
        return
    for step, (here, there) in enumerate(zip(ours["losses"], theirs["losses"])):
        assert here == pytest.approx(there, rel=TOLERANCE, abs=TOLERANCE), f"step {step}"
    leads = theirs.get("leads", {})
    assert ours.get("leads", {}) == pytest.approx(leads, rel=TOLERANCE, abs=LEAD / 10)
    assert ours.get("captions", {}).keys() == theirs.get("captions", {}).keys()
    for pair, caption in theirs.get("captions", {}).items():
        assert leads.get(pair, torch.inf) < LEAD or ours["captions"][pair] == caption, pair
