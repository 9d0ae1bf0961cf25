"""Write the dataset `tiles` in LEVIR-CC's official layout (see `diffcap.datasets.karpathy`); resumable.

    LevirCCcaptions.json              all pairs: train, val, test
    images/train/A/train_000001.png   before; B: after
    images/train/label/...            mask in the grid of the before image, one channel; 255: changed, 0: not
    facts.json                        "train_000001" -> the entry described below
    tiles.json                        the settings of the folder

An entry of `facts.json` has:

    change_type   one of `changes.CHANGES`; null for a pair without change
    boxes         {"before": [x0, y0, x1, y1] or null, "after": ...}: box around the changed objects in the grid of that image, x1 and
                  y1 exclusive; null if the objects are not in the image
    facts         what captions may state, see `changes.Change`; absent for a pair without change
"""

import json
import math
import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from diffcap.records import SPLITS, write_text
from diffcap.utils.errors import DiffcapError
from diffcap.worlds.rendering import CHUNK, claim_folder, render_chunks, sample_splits, write_image, write_lines
from diffcap.worlds.tiles.captions import write_captions
from diffcap.worlds.tiles.changes import CHANGES, Pair, sample_pair
from diffcap.worlds.tiles.render import TEXTURES, Date, change_mask, draw_ground, render, sample_dates, to_image
from diffcap.worlds.tiles.scenes import SIZE

RENDERER_VERSION = 1  # version of the images and captions: increase it if a code change alters them for the same seed
KINDS = 2 * len(CHANGES)  # number of kinds of pairs: each change, and no change in a scene that is sampled for it
_LAST_FILES = ("facts.json", "LevirCCcaptions.json")


@dataclass(frozen=True)
class Settings:
    """The settings that determine the content of all files; stored in `tiles.json`."""

    pairs: int
    seed: int
    jitter: float
    form: str = "tiles"
    look: int = RENDERER_VERSION


def write_tiles(
    folder: str | Path, pairs: int = 6000, seed: int = 0, jitter: float = 1.0, workers: int | None = None
) -> None:
    """Render a dataset, or the missing part of one that was interrupted.

    The files depend only on the settings. The scenes, images and captions of pair k of a seed do not depend on the size of the dataset.
    The splits (85, 5 and 10 %) are random; each has equally many pairs of every change type, and as many without change.

    `jitter`, 0 to 1, is the strength of differences between the dates that are not changes: season, light, haze, registration, noise.
    `workers` are processes, by default one per core, fewer for a small dataset.
    """
    if pairs < 3 * KINDS or pairs % 2:
        raise DiffcapError(f"tiles: pairs must be an even number, {3 * KINDS} or more, not {pairs}; fix it.")
    if not 0 <= jitter <= 1:
        raise DiffcapError(f"tiles: jitter must lie in 0 to 1, not {jitter:g}; fix it.")
    settings = Settings(pairs, seed, float(jitter))
    folder = Path(folder)
    if claim_folder(folder, settings, _LAST_FILES, "tiles"):
        return
    for name in SPLITS:
        for kind in ("A", "B", "label"):
            (folder / "images" / name / kind).mkdir(parents=True, exist_ok=True)
    with render_chunks(_write_chunk, folder, settings, pairs, workers, "pairs") as metadata:
        rows = dict(zip(_names(pairs, seed), metadata))
        names = sorted(rows, key=lambda name: (SPLITS.index(name.partition("_")[0]), name))
        write_lines(folder / "facts.json", {name: rows[name]["entry"] for name in names})
        images = []
        for index, name in enumerate(names):  # with the keys of the released file in their order
            split, captions = name.partition("_")[0], rows[name]["captions"]
            first_id = index * len(captions)
            ids = list(range(first_id, first_id + len(captions)))
            sentences = [
                {"tokens": caption.split(), "raw": f" {caption} .", "imgid": index, "sentid": id}
                for caption, id in zip(captions, ids)
            ]
            entry = {"filepath": split, "filename": f"{name}.png", "imgid": index, "sentences": sentences}
            changed = int(rows[name]["entry"]["change_type"] is not None)
            images.append({**entry, "split": split, "changeflag": changed, "sentids": ids})
        write_text(folder / "LevirCCcaptions.json", json.dumps({"images": images}) + "\n")


@dataclass(frozen=True)
class Rendered:
    """A pair with its images and captions."""

    pair: Pair
    images: tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]  # before and after, (SIZE, SIZE, 3)
    mask: npt.NDArray[np.uint8]  # (SIZE, SIZE), see `render.change_mask`
    boxes: dict[str, list[int] | None]  # see the module's docstring
    captions: list[str]


def appearance(number: int, seed: int, jitter: float) -> tuple[tuple[Date, Date], tuple[int, int]]:
    """Return the dates of pair 0, 1, ... of a seed, and the start of its textures; see `render.render`."""
    rng = random.Random(f"tiles dates {seed} {number}")
    dates = sample_dates(rng, jitter)
    return dates, (rng.randrange(TEXTURES), rng.randrange(TEXTURES))


def render_pair(number: int, seed: int = 0, jitter: float = 1.0) -> Rendered:
    """Render pair 0, 1, ... of a seed, and write its captions; see `write_tiles`."""
    pair = sample_pair(number, seed)
    dates, texture = appearance(number, seed, jitter)
    ground = draw_ground(pair.before)
    before = render(pair.before, dates[0], texture, ground)
    after = render(pair.after, dates[1], texture, ground if pair.change is None else None)
    mask = change_mask(pair.change, pair.after)
    boxes: dict[str, list[int] | None] = {"before": None, "after": None}
    if pair.change is not None:
        name, date = ("before", dates[0]) if pair.change.in_before else ("after", dates[1])
        boxes[name] = _box(mask, date)
    captions = write_captions(random.Random(f"tiles captions {seed} {number}"), pair.change)
    return Rendered(pair, (before, after), mask, boxes, captions)


def _box(mask: npt.NDArray[np.uint8], date: Date) -> list[int]:
    """Return the box of a mask's pixels in the image of a date."""
    y, x = np.nonzero(mask)
    x0, y0, x1, y1 = x.min(), y.min(), x.max() + 1, y.max() + 1
    corners = [to_image((float(a), float(b)), date) for a in (x0, x1) for b in (y0, y1)]
    low = np.floor(np.min(corners, 0) + 1e-6)
    high = np.ceil(np.max(corners, 0) - 1e-6)
    return [int(min(SIZE, max(0, value))) for value in (*low, *high)]


def _write_chunk(folder: Path, settings: Settings, start: int) -> list[dict[str, Any]]:
    rows = []
    for number in range(start, min(start + CHUNK, settings.pairs)):
        rendered = render_pair(number, settings.seed, settings.jitter)
        name = _names(settings.pairs, settings.seed)[number]
        split_name = name.partition("_")[0]
        for kind, image in zip(("A", "B", "label"), (*rendered.images, rendered.mask)):
            write_image(folder, f"images/{split_name}/{kind}/{name}.png", image, noisy=kind != "label")
        change = rendered.pair.change
        entry: dict[str, Any] = {"change_type": None if change is None else change.kind, "boxes": rendered.boxes}
        if change is not None:
            entry["facts"] = change.facts()
        rows.append({"captions": rendered.captions, "entry": entry})
    return rows


@cache
def _names(pairs: int, seed: int) -> list[str]:
    """Return the name of each pair, "train_000001"; every split is numbered from 1 on."""
    pairs_of_kind = {kind: list(range(kind, pairs, KINDS)) for kind in range(KINDS)}
    splits = sample_splits(pairs_of_kind, f"tiles splits {seed}", lambda count: math.floor(count + 0.5))
    names = {number: f"{name}_{place:06d}" for name in SPLITS for place, number in enumerate(splits[name], 1)}
    return [names[number] for number in range(pairs)]
