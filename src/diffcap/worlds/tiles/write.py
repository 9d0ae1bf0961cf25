"""Write the dataset `tiles` in the file format of LEVIR-MCI, see `diffcap.datasets.karpathy`. Interrupted runs can be resumed.

    LevirCCcaptions.json              the captions of all pairs
    images/train/A/train_000001.png   before image; the after image is in B
    images/train/label/...            mask with one channel: 255 where an object was added or removed; camera shift is ignored
    facts.json                        "train_000001" -> the entry described below
    tiles.json                        the settings of the folder

An entry of `facts.json` has:

    change_type   one of `changes.CHANGES`; null for a pair without change
    boxes         {"before": [x0, y0, x1, y1] or null, "after": ...}: box around the changed objects in pixels of that image, x1 and
                  y1 exclusive; null if the objects are not in the image
    facts         what captions may state, from `changes.Change.facts`; absent for a pair without change
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random

import numpy as np

from diffcap.records import SPLITS, ChangePair, JsonDict, read_json, write_text
from diffcap.utils.errors import DiffcapError
from diffcap.worlds.rendering import CHUNK, claim_folder, render_chunks, sample_splits, write_entries, write_image
from diffcap.worlds.tiles import render
from diffcap.worlds.tiles.captions import write_captions
from diffcap.worlds.tiles.changes import CHANGES, Pair, sample_pair
from diffcap.worlds.tiles.render import ByteArray, Date
from diffcap.worlds.tiles.scenes import SIZE

RENDERER_VERSION = 1  # version of the images and captions: increase it if a code change alters them for the same seed
# Pair k has the kind k % 16. Each type of change has two kinds: pairs with the change, and pairs that are sampled like them, without it.
NUM_PAIR_KINDS = 2 * len(CHANGES)
_FINAL_FILES = ("facts.json", "LevirCCcaptions.json")  # written after all images


def write_tiles(
    folder: str | Path, pairs: int = 6000, seed: int = 0, jitter: float = 1.0, workers: int | None = None
) -> None:
    """Render a dataset. If an earlier run was interrupted, render only what is missing.

    The files depend only on the settings. The scenes, images and captions of pair k of a seed are the same in datasets of any size. The
    splits (train 85 %, val 5 %, test 10 %) are random. In each, half of the pairs have no change; all types of change are equally frequent.

    `jitter`, 0 to 1, is the strength of differences that are not the change: season, light, haze, shift of the camera, and noise.
    `workers` is the number of processes, by default one per core, or fewer for a small dataset.
    """
    if pairs < 3 * NUM_PAIR_KINDS or pairs % 2:
        raise DiffcapError(f"tiles: pairs must be an even number, {3 * NUM_PAIR_KINDS} or more, not {pairs}; fix it.")
    if not 0 <= jitter <= 1:
        raise DiffcapError(f"tiles: jitter must lie in 0 to 1, not {jitter:g}; fix it.")
    settings = {"pairs": pairs, "seed": seed, "jitter": float(jitter), "form": "tiles", "look": RENDERER_VERSION}
    folder = Path(folder)
    if claim_folder(folder, settings, _FINAL_FILES, "tiles"):
        return
    with render_chunks(_write_chunk, folder, settings, pairs, workers, "pairs") as metadata:
        metadata_by_name = dict(zip(_pair_names(pairs, seed), metadata))
        names = sorted(metadata_by_name, key=lambda name: (SPLITS.index(name.partition("_")[0]), name))
        write_entries(folder / "facts.json", {name: metadata_by_name[name]["entry"] for name in names})
        images = []
        for index, name in enumerate(names):
            split, captions = name.partition("_")[0], metadata_by_name[name]["captions"]
            sentence_ids = list(range(index * len(captions), (index + 1) * len(captions)))
            sentences = [
                {"tokens": caption.split(), "raw": f" {caption} .", "imgid": index, "sentid": sentence_id}
                for caption, sentence_id in zip(captions, sentence_ids)
            ]
            # The keys have the order of LEVIR-CC's file.
            entry = {"filepath": split, "filename": f"{name}.png", "imgid": index, "sentences": sentences}
            change_flag = int(metadata_by_name[name]["entry"]["change_type"] is not None)
            images.append({**entry, "split": split, "changeflag": change_flag, "sentids": sentence_ids})
        write_text(folder / "LevirCCcaptions.json", json.dumps({"images": images}) + "\n")


@dataclass(frozen=True)
class RenderedPair:
    """A pair of scenes with its images and captions."""

    pair: Pair
    images: tuple[ByteArray, ByteArray]  # before and after, (SIZE, SIZE, 3)
    mask: ByteArray  # (SIZE, SIZE), 255 where an object was added or removed; camera shift is ignored
    boxes: dict[str, list[int] | None]  # "boxes" of an entry of `facts.json`
    captions: list[str]


def sample_appearance(number: int, seed: int, jitter: float) -> tuple[tuple[Date, Date], tuple[int, int]]:
    """Sample the dates of both images (season, light, haze, camera shift), and the x and y in the textures, which are equal for both."""
    rng = Random(f"tiles dates {seed} {number}")
    dates = render.sample_dates(rng, jitter)
    return dates, (rng.randrange(render.NUM_TEXTURE_STARTS), rng.randrange(render.NUM_TEXTURE_STARTS))


def render_pair(number: int, seed: int = 0, jitter: float = 1.0) -> RenderedPair:
    """Render the pair with this number, and write its captions. Number, seed and jitter determine the result."""
    pair = sample_pair(number, seed)
    dates, texture_start = sample_appearance(number, seed, jitter)
    ground = render.draw_ground(pair.before)
    before = render.render(pair.before, dates[0], texture_start, ground)
    after = render.render(pair.after, dates[1], texture_start, ground if pair.change is None else None)
    mask = render.change_mask(pair.change, pair.after)
    boxes: dict[str, list[int] | None] = {"before": None, "after": None}
    if pair.change is not None:
        name, date = ("before", dates[0]) if pair.change.is_in_before else ("after", dates[1])
        rows, columns = np.nonzero(mask)
        x0, y0, x1, y1 = columns.min(), rows.min(), columns.max() + 1, rows.max() + 1
        corners = [render.to_image((float(x), float(y)), date) for x in (x0, x1) for y in (y0, y1)]
        lower, upper = np.floor(np.min(corners, 0) + 1e-6), np.ceil(np.max(corners, 0) - 1e-6)
        boxes[name] = [int(min(SIZE, max(0, value))) for value in (*lower, *upper)]
    captions = write_captions(Random(f"tiles captions {seed} {number}"), pair.change)
    return RenderedPair(pair, (before, after), mask, boxes, captions)


def oracle_captions(folder: Path, pairs: Sequence[ChangePair], repeats: int = 6) -> dict[str, list[str]]:
    """Return id -> sentences that know the scenes, `repeats` times as many as references. See `DatasetSpec.oracle`."""
    file = folder / "tiles.json"
    settings = read_json(file) if file.is_file() else {}
    if settings.get("look") != RENDERER_VERSION:
        return {}
    numbers = {name: number for number, name in enumerate(_pair_names(settings["pairs"], settings["seed"]))}
    captions = {}
    for pair in pairs:
        rng = Random(f"tiles oracle {settings['seed']} {numbers[pair.id]}")
        change = sample_pair(numbers[pair.id], settings["seed"]).change
        captions[pair.id] = [sentence for _ in range(repeats) for sentence in write_captions(rng, change)]
        rng.shuffle(captions[pair.id])  # the sentences without change have a fixed order
    return captions


def _write_chunk(folder: Path, settings: JsonDict, start: int) -> list[JsonDict]:
    """Write the images of a chunk of pairs. Return the captions and the entry of `facts.json` of each pair."""
    metadata = []
    for number in range(start, min(start + CHUNK, settings["pairs"])):
        rendered = render_pair(number, settings["seed"], settings["jitter"])
        name = _pair_names(settings["pairs"], settings["seed"])[number]
        split = name.partition("_")[0]
        for image_kind, image in zip(("A", "B", "label"), (*rendered.images, rendered.mask)):
            write_image(folder, f"images/{split}/{image_kind}/{name}.png", image, is_noisy=image_kind != "label")
        change = rendered.pair.change
        entry: JsonDict = {"change_type": change and change.change_type, "boxes": rendered.boxes}
        if change is not None:
            entry["facts"] = change.facts()
        metadata.append({"captions": rendered.captions, "entry": entry})
    return metadata


@cache
def _pair_names(pairs: int, seed: int) -> list[str]:
    """Return the name of each pair, for example "train_000001"; the numbers start at 1 in each split."""
    pairs_of_kind = {kind: list(range(kind, pairs, NUM_PAIR_KINDS)) for kind in range(NUM_PAIR_KINDS)}
    splits = sample_splits(pairs_of_kind, f"tiles splits {seed}", lambda count: math.floor(count + 0.5))
    names = {number: f"{split}_{position:06d}" for split in SPLITS for position, number in enumerate(splits[split], 1)}
    return [names[number] for number in range(pairs)]
