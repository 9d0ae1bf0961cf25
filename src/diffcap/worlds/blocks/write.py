"""Write the dataset `blocks` with the files of CLEVR-Change, which `diffcap.datasets.clevr` describes. Interrupted runs can be resumed.

Triple 123 has three images: before a change, after the change, and a distractor (the scene before, with another camera and light).
Its pairs are (before, after) and (before, distractor). `blocks.json` has the folder's settings, and `scenes.json` has under "000123.png":

    boxes                     {"before": [x0, y0, x1, y1] or null, "after": ...}: box of the visible pixels of the changed
                              object, x1 and y1 exclusive; null if the object is not in the image
    viewpoint_iou             mean overlap of the objects' boxes in the before and after image, 1 for the same camera
    viewpoint_iou_distractor  mean overlap of the objects' boxes in the before image and the distractor
    changed                   {"size", "color", "material", "shape", "to"}: the changed object before the change; "to" is the
                              new color or material, or null for another change
"""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch

from diffcap.records import ChangePair, JsonDict, read_json, write_json
from diffcap.utils.errors import DiffcapError
from diffcap.worlds.blocks.captions import words_of_slots, write_captions
from diffcap.worlds.blocks.geometry import COLORS, MATERIALS
from diffcap.worlds.blocks.render import render
from diffcap.worlds.blocks.scenes import CHANGES, COLOR, MATERIAL, Triples, sample_triples
from diffcap.worlds.rendering import CHUNK, claim_folder, render_chunks, sample_splits, write_entries, write_image

# Folder and part of the file name of the before images, the after images and the distractors.
IMAGE_FOLDERS = (("images", "default"), ("sc_images", "semantic"), ("nsc_images", "nonsemantic"))
RENDERER_VERSION = 3  # version of the images and captions: increase it if a code change alters them for the same seed
_FINAL_FILES = ("change_captions.json", "no_change_captions.json", "type_mapping.json", "scenes.json", "splits.json")


def write_blocks(
    folder: str | Path,
    pairs: int = 6000,
    seed: int = 0,
    size: tuple[int, int] = (128, 96),
    jitter: float = 1.0,
    workers: int | None = None,
) -> None:
    """Render a dataset. If an earlier run was interrupted, render only what is missing.

    The files depend only on the settings. Triple k of a seed is the same in datasets of any size. The splits (train 85 %, val 5 %,
    test 10 %) are random; each has equally many pairs of every change type. A triple counts as two `pairs`.

    `size` is (width, height), at least 64 x 48. `jitter`, 0 to 3, is the strength of the variation of camera and light within a triple;
    CLEVR-Change has about 1. `workers` is the number of processes, by default one per core, or fewer for a small dataset.
    """
    if pairs < 30 or pairs % 2:
        raise DiffcapError(f"blocks: pairs must be an even number, 30 or more, not {pairs}; fix it.")
    if size[0] < 64 or size[1] < 48:
        raise DiffcapError(f"blocks: size must be 64 x 48 or larger, not {size[0]} x {size[1]}, to see small objects.")
    if not 0 <= jitter <= 3:
        raise DiffcapError(f"blocks: jitter must lie in 0 to 3, not {jitter:g}; fix it.")
    settings = {"pairs": pairs, "seed": seed, "size": [*size], "jitter": float(jitter), "look": RENDERER_VERSION}
    folder = Path(folder)
    if claim_folder(folder, settings, _FINAL_FILES, "blocks"):
        return
    with render_chunks(_write_chunk, folder, settings, pairs // 2, workers, "triples") as metadata:
        files = [f"{triple:06d}.png" for triple in range(len(metadata))]
        triples_of_type = {name: list(range(k, len(files), len(CHANGES))) for k, name in enumerate(CHANGES)}
        for name, key in (("change_captions.json", "captions"), ("no_change_captions.json", "no_change")):
            write_json(folder / name, {f"CLEVR_default_{file}": entry[key] for file, entry in zip(files, metadata)})
        files_of_type = {name: [files[triple] for triple in numbers] for name, numbers in triples_of_type.items()}
        write_json(folder / "type_mapping.json", files_of_type)
        write_entries(folder / "scenes.json", {file: entry["scene"] for file, entry in zip(files, metadata)})
        write_json(folder / "splits.json", sample_splits(triples_of_type, f"blocks splits {seed}", round))


def oracle_captions(folder: Path, pairs: Sequence[ChangePair], repeats: int = 6) -> dict[str, list[str]]:
    """Return id -> sentences that know the scenes, `repeats` times as many as references. See `DatasetSpec.oracle`."""
    file = folder / "blocks.json"
    settings = read_json(file) if file.is_file() else {}
    if settings.get("look") != RENDERER_VERSION:
        return {}
    numbers = sorted({int(pair.id[:6]) for pair in pairs})
    by_id: dict[str, list[str]] = defaultdict(list)
    for start in range(0, len(numbers), CHUNK):
        chunk = numbers[start : start + CHUNK]
        triples = _sample(settings, chunk)
        for repeat in range(repeats):
            captions = write_captions(triples, -1 - repeat - settings["seed"])  # no folder has a negative seed
            for suffix, texts in zip(("", "_n"), captions):
                for number, sentences in zip(chunk, texts):
                    by_id[f"{number:06d}.png{suffix}"] += sentences
    return {pair.id: by_id[pair.id] for pair in pairs}


def _sample(settings: JsonDict, indices: Sequence[int]) -> Triples:
    return sample_triples(indices, settings["seed"], settings["jitter"])


def _write_chunk(folder: Path, settings: JsonDict, start: int) -> list[JsonDict]:
    """Write the images of `CHUNK` triples. Return the metadata of each: captions of both pairs, entry of `scenes.json`."""
    indices = range(start, start + CHUNK)  # the last chunk can have too many triples, which are cut off below
    triples = _sample(settings, indices)
    images, slot_maps = render(triples.scenes(), settings["size"])
    num_triples = min(CHUNK, settings["pairs"] // 2 - start)
    pixels = images.permute(0, 2, 3, 1).contiguous().numpy()
    for index, (folder_name, file_part) in enumerate(IMAGE_FOLDERS):
        for row in range(num_triples):
            write_image(folder, f"{folder_name}/CLEVR_{file_part}_{start + row:06d}.png", pixels[index * CHUNK + row])
    change_captions, no_change_captions = write_captions(triples, settings["seed"])
    before_after_maps = slot_maps.view(3, len(triples), *slot_maps.shape[1:])[:2]
    is_changed = before_after_maps == triples.changed[:, None, None]
    columns, rows = is_changed.any(2).int(), is_changed.any(3).int()  # (2, T, W), (2, T, H)
    first_indices = [axis.argmax(-1) for axis in (columns, rows)]
    end_indices = [axis.shape[-1] - axis.flip(-1).argmax(-1) for axis in (columns, rows)]
    boxes = torch.stack(first_indices + end_indices, -1).tolist()
    is_visible = is_changed.flatten(2).any(2).tolist()
    change_iou, distractor_iou = (iou.tolist() for iou in triples.viewpoint_iou())
    metadata = []
    for row, change_index in enumerate(triples.change.tolist()):
        scenes = triples.after if CHANGES[change_index] == "add" else triples.before
        words = words_of_slots(scenes, row)[int(triples.changed[row])]
        new_values = {COLOR: COLORS, MATERIAL: MATERIALS}.get(change_index)
        changed_boxes = (boxes[index][row] if is_visible[index][row] else None for index in range(2))
        scene = {
            "boxes": dict(zip(("before", "after"), changed_boxes)),
            "viewpoint_iou": round(change_iou[row], 4),
            "viewpoint_iou_distractor": round(distractor_iou[row], 4),
            "changed": {
                **dict(zip(("size", "color", "material", "shape"), words)),
                "to": new_values[int(triples.new_value[row])] if new_values else None,
            },
        }
        metadata.append({"captions": change_captions[row], "no_change": no_change_captions[row], "scene": scene})
    return metadata[:num_triples]
