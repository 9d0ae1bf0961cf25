"""`blocks` on disk, in CLEVR-Change's official layout (see `diffcap.datasets.clevr_change`), by all cores, resumable.

Beside the official files stand `scenes.json` (below) and `blocks.json`, the settings that the folder was made with.
`scenes.json` holds under "000123.png":

    boxes                     {"before": [x0, y0, x1, y1] or null, "after": ...}: the pixels of the changed object that
                              show, x1 and y1 just past the last; null where it does not stand
    viewpoint_iou             of the change pair, 1 for the same camera (`Triples.viewpoint_iou`)
    viewpoint_iou_distractor  of the distractor pair
    changed                   {"size", "color", "material", "shape", "to"}: before the change; "to" the new color or
                              material, null for other changes
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diffcap.datasets.blocks.captions import write_captions
from diffcap.datasets.blocks.chunks import (
    CHUNK,
    claim,
    clear_parts,
    encode_png,
    read_parts,
    render_all,
    write_image,
    write_part,
)
from diffcap.datasets.blocks.geometry import COLORS, MATERIALS, SHAPES, SIZES
from diffcap.datasets.blocks.render import render
from diffcap.datasets.blocks.scenes import CHANGES, COLOR, MATERIAL, Triples, sample_triples
from diffcap.errors import DiffcapError
from diffcap.records import write_json, write_text

VIEWS = (("images", "default"), ("sc_images", "semantic"), ("nsc_images", "nonsemantic"))
LOOK = 3  # raise it when the same seed comes to give other pictures or captions
_OFFICIAL = ("change_captions.json", "no_change_captions.json", "type_mapping.json", "scenes.json", "splits.json")


@dataclass(frozen=True)
class Settings:
    """What decides every byte of the folder."""

    pairs: int
    seed: int
    size: tuple[int, int]
    jitter: float
    look: int = LOOK

    @property
    def triples(self) -> int:
        """A triple is a change pair and a distractor pair."""
        return self.pairs // 2


def write_blocks(
    folder: str | Path,
    pairs: int = 6000,
    seed: int = 0,
    size: tuple[int, int] = (128, 96),
    jitter: float = 1.0,
    workers: int | None = None,
) -> None:
    """Render a dataset, or finish one that was interrupted, or find it finished.

    The same settings give the same bytes, on any number of workers and after any interruption. Triple k of a seed is
    the same in a dataset of any size. Splits are by seed, 85 / 5 / 10 %, each with every change equally often.

    Args:
        folder: made if it is not there; else it must be empty or come from the same settings.
        pairs: change and distractor pairs together, half of each; even, 30 or more (one of each change in each split).
        seed: of scenes, captions and splits.
        size: width and height of the images in pixels, at least 64 x 48.
        jitter: how far camera and light stray between the images of a triple; 0 keeps them, 1 is about CLEVR-Change's.
        workers: processes; as many as there are cores by default, fewer for a small dataset.

    Raises:
        DiffcapError: a setting makes no sense, or the folder holds something else.
    """
    settings = _check(pairs, seed, size, jitter)
    folder = Path(folder)
    if claim(folder, settings, _OFFICIAL):
        return
    for name, _ in VIEWS:
        (folder / name).mkdir(parents=True, exist_ok=True)
    _finish(folder, settings, render_all(_write_chunk, folder, settings, settings.triples, workers, "triples"))


def _check(pairs: int, seed: int, size: tuple[int, int], jitter: float) -> Settings:
    if pairs < 30 or pairs % 2:
        raise DiffcapError(f"blocks: pairs must be an even number, 30 or more, not {pairs}; fix it.")
    check_look(size, jitter)
    return Settings(pairs, seed, (size[0], size[1]), float(jitter))


def check_look(size: tuple[int, int], jitter: float) -> None:
    """Refuse pictures too small to see something in, and cameras that stray too far."""
    if size[0] < 64 or size[1] < 48:
        raise DiffcapError(
            f"blocks: size must be 64 x 48 or larger, not {size[0]} x {size[1]}: smaller objects cannot be seen."
        )
    if not 0 <= jitter <= 3:
        raise DiffcapError(f"blocks: jitter must lie in 0 to 3, not {jitter:g}; fix it.")


def _write_chunk(folder: Path, settings: Settings, start: int) -> None:
    """Images of one chunk, then what the JSON files will say of it."""
    triples = sample_triples(range(start, start + CHUNK), settings.seed, settings.jitter)  # whole, also the last one
    images, index = render(triples.scenes(), settings.size)
    count = min(CHUNK, settings.triples - start)
    data = encode_png(images)
    for view, (where, name) in enumerate(VIEWS):
        for row in range(count):
            write_image(folder, folder / where / f"CLEVR_{name}_{start + row:06d}.png", data[view * CHUNK + row])
    write_part(folder, start, _describe(triples, index, settings.seed)[:count])


def _describe(triples: Triples, index: Tensor, seed: int) -> list[dict[str, Any]]:
    """For each triple its change, captions of both pairs, and its entry of `scenes.json`."""
    said, unsaid = write_captions(triples, seed)
    mask = index.view(3, len(triples), *index.shape[1:])[:2] == triples.changed[:, None, None]
    across, down = mask.any(2).int(), mask.any(3).int()  # (2, T, W), (2, T, H)
    first = [axis.argmax(-1) for axis in (across, down)]
    past_last = [axis.shape[-1] - axis.flip(-1).argmax(-1) for axis in (across, down)]
    boxes, there = torch.stack(first + past_last, -1).tolist(), mask.flatten(2).any(2).tolist()
    change_iou, distractor_iou = (iou.tolist() for iou in triples.viewpoint_iou())
    described = []
    for row, change in enumerate(triples.change.tolist()):
        scenes = triples.after if CHANGES[change] == "add" else triples.before
        place = row, int(triples.changed[row])
        to = {COLOR: COLORS, MATERIAL: MATERIALS}.get(change)
        scene = {
            "boxes": {name: boxes[k][row] if there[k][row] else None for k, name in enumerate(("before", "after"))},
            "viewpoint_iou": round(change_iou[row], 4),
            "viewpoint_iou_distractor": round(distractor_iou[row], 4),
            "changed": {
                "size": SIZES[scenes.size[place]],
                "color": COLORS[scenes.color[place]],
                "material": MATERIALS[scenes.material[place]],
                "shape": SHAPES[scenes.shape[place]],
                "to": to[int(triples.new_value[row])] if to else None,
            },
        }
        described.append({"change": CHANGES[change], "captions": said[row], "no_change": unsaid[row], "scene": scene})
    return described


def _finish(folder: Path, settings: Settings, chunks: range) -> None:
    rows = read_parts(folder, chunks)
    keys = [f"{number:06d}.png" for number in range(len(rows))]
    of_type = {kind: [number for number, row in enumerate(rows) if row["change"] == kind] for kind in CHANGES}
    for name, said in (("change_captions.json", "captions"), ("no_change_captions.json", "no_change")):
        write_json(folder / name, {f"CLEVR_default_{key}": row[said] for key, row in zip(keys, rows)})
    write_json(folder / "type_mapping.json", {kind: [keys[number] for number in of_type[kind]] for kind in CHANGES})
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(row['scene'])}" for key, row in zip(keys, rows))
    write_text(folder / "scenes.json", f"{{\n{lines}\n}}\n")
    write_json(folder / "splits.json", _split(of_type, settings.seed))
    clear_parts(folder)


def _split(of_type: dict[str, list[int]], seed: int) -> dict[str, list[int]]:
    splits: dict[str, list[int]] = {"train": [], "val": [], "test": []}
    for kind, numbers in of_type.items():
        shuffled = random.Random(f"blocks splits {seed} {kind}").sample(numbers, len(numbers))
        test, val = (max(1, round(share * len(numbers))) for share in (0.10, 0.05))
        splits["test"] += shuffled[:test]
        splits["val"] += shuffled[test : test + val]
        splits["train"] += shuffled[test + val :]
    return {split: sorted(numbers) for split, numbers in splits.items()}
