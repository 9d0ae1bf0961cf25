"""Write the dataset `blocks` in CLEVR-Change's official layout (see `diffcap.datasets.clevr`); resumable.

There are two more files: `blocks.json` has the settings of the folder, and `scenes.json` has under "000123.png":

    boxes                     {"before": [x0, y0, x1, y1] or null, "after": ...}: box of the visible pixels of the changed
                              object, x1 and y1 exclusive; null if the object is not in the image
    viewpoint_iou             of the change pair, 1 for the same camera (`Triples.viewpoint_iou`)
    viewpoint_iou_distractor  of the distractor pair
    changed                   {"size", "color", "material", "shape", "to"}: the changed object before the change; "to" is the
                              new color or material, null for other changes
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from diffcap.records import write_json
from diffcap.utils.errors import DiffcapError
from diffcap.worlds.blocks.captions import write_captions
from diffcap.worlds.blocks.geometry import COLORS, MATERIALS, SHAPES, SIZES
from diffcap.worlds.blocks.render import render
from diffcap.worlds.blocks.scenes import CHANGES, COLOR, MATERIAL, sample_triples
from diffcap.worlds.rendering import CHUNK, claim_folder, render_chunks, sample_splits, write_image, write_lines

VIEWS = (("images", "default"), ("sc_images", "semantic"), ("nsc_images", "nonsemantic"))
RENDERER_VERSION = 3  # version of the images and captions: increase it if a code change alters them for the same seed
_OFFICIAL = ("change_captions.json", "no_change_captions.json", "type_mapping.json", "scenes.json", "splits.json")


@dataclass(frozen=True)
class Settings:
    """The settings that determine the content of all files; stored in `blocks.json`."""

    pairs: int
    seed: int
    size: tuple[int, int]
    jitter: float
    look: int = RENDERER_VERSION  # "look" is the key in the settings file of a dataset


def write_blocks(
    folder: str | Path,
    pairs: int = 6000,
    seed: int = 0,
    size: tuple[int, int] = (128, 96),
    jitter: float = 1.0,
    workers: int | None = None,
) -> None:
    """Render a dataset, or the missing part of one that was interrupted.

    The files depend only on the settings. Triple k of a seed does not depend on the size of the dataset. The splits (85, 5 and 10 %) are
    random; each has equally many pairs of every change type.

    `size` (width, height) is at least 64 x 48; `jitter` is the strength of the variation of camera and light within a triple, 0 to 3,
    about 1 in CLEVR-Change; `workers` are processes, by default one per core, fewer for a small dataset.
    """
    if pairs < 30 or pairs % 2:
        raise DiffcapError(f"blocks: pairs must be an even number, 30 or more, not {pairs}; fix it.")
    if size[0] < 64 or size[1] < 48:
        raise DiffcapError(
            f"blocks: size must be 64 x 48 or larger, not {size[0]} x {size[1]}: smaller objects cannot be seen."
        )
    if not 0 <= jitter <= 3:
        raise DiffcapError(f"blocks: jitter must lie in 0 to 3, not {jitter:g}; fix it.")
    settings = Settings(pairs, seed, (size[0], size[1]), float(jitter))
    folder = Path(folder)
    if claim_folder(folder, settings, _OFFICIAL):
        return
    for where, _ in VIEWS:
        (folder / where).mkdir(exist_ok=True)
    with render_chunks(_write_chunk, folder, settings, pairs // 2, workers, "triples") as rows:
        keys = [f"{number:06d}.png" for number in range(len(rows))]
        triples_of_type: dict[str, list[int]] = {change_type: [] for change_type in CHANGES}
        for number, row in enumerate(rows):
            triples_of_type[row["change"]].append(number)
        for name, field in (("change_captions.json", "captions"), ("no_change_captions.json", "no_change")):
            write_json(folder / name, {f"CLEVR_default_{key}": row[field] for key, row in zip(keys, rows)})
        files_of_type = {name: [keys[number] for number in numbers] for name, numbers in triples_of_type.items()}
        write_json(folder / "type_mapping.json", files_of_type)
        write_lines(folder / "scenes.json", {key: row["scene"] for key, row in zip(keys, rows)})
        write_json(folder / "splits.json", sample_splits(triples_of_type, f"blocks splits {seed}", round))


def _write_chunk(folder: Path, settings: Settings, start: int) -> list[dict[str, Any]]:
    """Write images, and return the metadata of each triple: change type, captions of both pairs, entry of `scenes.json`."""
    triples = sample_triples(range(start, start + CHUNK), settings.seed, settings.jitter)  # the last chunk is cut below
    images, slots = render(triples.scenes(), settings.size)
    count = min(CHUNK, settings.pairs // 2 - start)
    pixels = images.permute(0, 2, 3, 1).contiguous().cpu().numpy()
    for view, (where, name) in enumerate(VIEWS):
        for row in range(count):
            write_image(folder, f"{where}/CLEVR_{name}_{start + row:06d}.png", pixels[view * CHUNK + row])
    captions = zip(triples.change.tolist(), *write_captions(triples, settings.seed))
    before_after_slots = slots.view(3, len(triples), *slots.shape[1:])[:2]
    mask = before_after_slots == triples.changed[:, None, None]
    across, down = mask.any(2).int(), mask.any(3).int()  # (2, T, W), (2, T, H)
    first = [axis.argmax(-1) for axis in (across, down)]
    past_last = [axis.shape[-1] - axis.flip(-1).argmax(-1) for axis in (across, down)]
    boxes = torch.stack(first + past_last, -1).tolist()
    is_visible = mask.flatten(2).any(2).tolist()
    change_iou, distractor_iou = (iou.tolist() for iou in triples.viewpoint_iou())
    metadata = []
    for row, (change, change_captions, no_change_captions) in enumerate(captions):
        scenes = triples.after if CHANGES[change] == "add" else triples.before
        slot = row, int(triples.changed[row])  # an index into the tensors of `scenes`
        new_values = {COLOR: COLORS, MATERIAL: MATERIALS}.get(change)
        changed_boxes = (boxes[k][row] if is_visible[k][row] else None for k in range(2))
        scene = {
            "boxes": dict(zip(("before", "after"), changed_boxes)),
            "viewpoint_iou": round(change_iou[row], 4),
            "viewpoint_iou_distractor": round(distractor_iou[row], 4),
            "changed": {
                "size": SIZES[scenes.size[slot]],
                "color": COLORS[scenes.color[slot]],
                "material": MATERIALS[scenes.material[slot]],
                "shape": SHAPES[scenes.shape[slot]],
                "to": new_values[int(triples.new_value[row])] if new_values else None,
            },
        }
        kind = CHANGES[change]
        metadata.append({"change": kind, "captions": change_captions, "no_change": no_change_captions, "scene": scene})
    return metadata[:count]
