"""A dataset folder as the stages leave it, made in milliseconds: CLEVR-like scenes, features that name their image."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from diffcap.features.writer import StoreWriter
from diffcap.negatives.file import CaptionNegatives, Negative, write_negatives
from diffcap.records import ChangePair, write_dataset

SHAPE = (4, 2, 3)  # of a feature map
COLORS, THINGS = ("red", "green", "blue", "gray"), ("cube", "ball", "tube")
NEGATIVES = 3


def captions(scene: int, distractor: bool) -> list[str]:
    """Two or three sentences of different lengths that no other scene has."""
    what = f"{COLORS[scene % 4]} {THINGS[scene // 4 % 3]} number{scene}"
    if distractor:
        return [f"nothing happened to the {what}", f"the {what} is as it was before the camera moved a little"]
    return [f"the {what} moved", f"somebody took the {what} and put it elsewhere", f"{what} moved"][: 2 + scene % 2]


def pairs(scenes: int) -> list[ChangePair]:
    """A change pair and a distractor pair of each scene; every sixth scene is for validation, every seventh a test."""
    rows = []
    for scene in range(scenes):
        split = "val" if scene % 6 == 5 else "test" if scene % 7 == 6 else "train"
        default, change, view = (f"{kind}/{scene}.png" for kind in ("default", "semantic", "nonsemantic"))
        rows.append(ChangePair(f"{scene}.png", default, change, captions(scene, False), split, "move"))
        rows.append(ChangePair(f"{scene}.png_n", default, view, captions(scene, True), split, None, True))
    return rows


def write_toy(folder: Path, scenes: int = 24) -> Path:
    """Manifest, feature store "toy", and negatives; channel 0 of an image's features is its row in the store."""
    rows = pairs(scenes)
    write_dataset(folder, "toy", folder, rows, {})
    paths = list(dict.fromkeys(path for pair in rows for path in (pair.before, pair.after)))
    store = StoreWriter(folder / "features" / "toy", paths, SHAPE, {"backbone": "toy"})
    features = np.random.default_rng(0).standard_normal((len(paths), *SHAPE)).astype(np.float32)
    features[:, 0] = np.arange(len(paths))[:, None, None] / 16  # exact in float16
    store.write(np.arange(len(paths)), features)
    store.finish()
    _write_negatives(folder, rows)
    return folder


def write_toy_singles(folder: Path, images: int = 20, meta: str = "toy") -> Path:
    """Captioned single images, the CUB form: words that the pairs do not have, a store "toy", negatives."""
    rows = [
        ChangePair(f"s{n}", f"single/{n}.png", None, [f"a {COLORS[n % 4]} bird", f"bird number{n} flies"], split)
        for n in range(images)
        for split in ["val" if n % 5 == 4 else "train"]
    ]
    _write_images(folder, "toy_singles", rows, meta)
    _write_negatives(folder, rows)
    return folder


def write_toy_labelled(folder: Path, images: int = 18, meta: str = "toy") -> Path:
    """Single images of three classes, the NABirds form, in a store "toy"."""
    rows = [
        ChangePair(f"l{n}", f"labelled/{n}.png", None, [], "train" if n % 2 else "test", extra={"class": n % 3})
        for n in range(images)
    ]
    _write_images(folder, "toy_labelled", rows, meta)
    return folder


def _write_images(folder: Path, name: str, rows: list[ChangePair], meta: str) -> None:
    write_dataset(folder, name, folder, rows, {})
    store = StoreWriter(folder / "features" / "toy", [row.before for row in rows], SHAPE, {"backbone": meta})
    features = np.random.default_rng(1).standard_normal((len(rows), *SHAPE)).astype(np.float32)
    features[:, 0] = np.arange(len(rows))[:, None, None] / 16
    store.write(np.arange(len(rows)), features)
    store.finish()


def _write_negatives(folder: Path, rows: list[ChangePair]) -> None:
    lines = []
    for pair in rows:
        if pair.split == "train":
            for number, caption in enumerate(pair.captions):
                wrong = [f"{pair.id.split('.')[0]} {THINGS[n]} {caption.split()[-1]}" for n in range(NEGATIVES)]
                kinds = ("retrieve", "replace", "confuse")
                found = [Negative(kind, f"{text} {COLORS[number]}") for kind, text in zip(kinds, wrong)]
                lines.append(CaptionNegatives(pair.id, caption, found))
    write_negatives(folder / "negatives.jsonl", lines)


def toy_trainer(step: int = 0, rank: int = 0, ranks: int = 1, accumulate: int = 1) -> Any:
    """What a data module reads of Lightning's trainer."""
    return SimpleNamespace(
        global_step=step, global_rank=rank, world_size=ranks, accumulate_grad_batches=accumulate, max_steps=100
    )


def batches_of_ranks(data: Any, step: int, ranks: int = 3) -> list[dict[str, Any]]:
    """The parts of one training batch of a data module that the ranks of a run get."""
    parts = []
    for rank in range(ranks):
        data.trainer = toy_trainer(rank=rank, ranks=ranks)
        parts.append(data.make_batch(step))
    data.trainer = None
    return parts
