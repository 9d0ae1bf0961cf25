"""Import features that the authors of the methods released into a feature store.

The folder holds one of two formats:

* `.npy` (SCORER, DIRL): one array per image, `features/CLEVR_default_000123.png.npy`, `sc_features/...`, `nsc_features/...`, or the
  same file names anywhere in the folder, if they are unique;
* pickles (IDC-PCL): `img.pkl`, `sc_img.pkl`, `nsc_img.pkl` in the folder or in its `full/`, each a dict from image name without
  extension to array; or a single pickle with any name for all images (birds). Each is read completely, without executing code:
  40,000 maps of 2048 x 7 x 7 in float32 need 16 GB of memory.

An array is (C, h, w), (1, C, h, w), or (C, h * h), as IDC-PCL's features of birds.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from diffcap.features.images import image_stamps, unique_images
from diffcap.features.store import Array
from diffcap.features.writer import StoreWriter
from diffcap.records import Dataset, file_hash, write_json
from diffcap.utils.errors import DiffcapError, wrap_errors
from diffcap.utils.unpickling import load_arrays

# Folder of an image in a manifest -> prefix of the folder, or of the pickle, of its features.
_PREFIXES = {"images": "", "bef": "", "sc_images": "sc_", "aft": "sc_", "nsc_images": "nsc_"}


def fill_store(dataset: Dataset, source: str | Path, store: str | Path) -> int:
    """Import the features of all images of a dataset from the authors' folder, and describe their origin in the store's `source.json`.

    Returns the number of imported images; images that the store has already from the same files are not imported again.
    """
    source = Path(source)
    paths = unique_images(dataset.pairs)
    if not source.is_dir():
        raise DiffcapError(f"{source}: no such folder; give the folder of the authors' features.")
    pickles = _find_pickles(source)
    if pickles and (missing_prefixes := {_prefix(path) for path in paths} - set(pickles)):
        names = ", ".join(sorted(f"{prefix}img.pkl" for prefix in missing_prefixes))
        raise DiffcapError(
            f"{source}: {names} is missing; put it into the same folder as {next(iter(pickles.values())).name}."
        )
    origin = {path: pickles[_prefix(path)] for path in paths} if pickles else _find_arrays(paths, source)
    done: set[str] = set()  # images that the store has already; known only after the store was opened below
    maps = _read_maps(origin, done)
    first = next(maps)
    shape = first[1].shape
    meta = {"library": "authors", "form": "pickles" if pickles else "npy"}
    writer = StoreWriter(store, paths, shape, meta, image_stamps([origin[path] for path in paths]))
    row_of = {path: row for row, path in enumerate(writer.paths)}
    missing_rows = set(writer.missing().tolist())
    done |= {path for path in paths if row_of[path] not in missing_rows}
    try:
        for path, array in chain([first], maps):
            if array.shape != shape:
                raise DiffcapError(f"{origin[path]}: features of {array.shape}, expected {shape}; fetch it again.")
            if path not in done:
                writer.write(np.array([row_of[path]]), array[None])
    finally:
        writer.flush()  # keep the features of the other files if one of them is invalid
    source_info: dict[str, Any] = {"folder": str(source.absolute()), "form": meta["form"], "images": len(paths)}
    used_files = sorted(set(origin.values()))
    if pickles:
        source_info["files"] = [
            {"name": str(path.relative_to(source)), "bytes": path.stat().st_size, "sha256": file_hash(path)}
            for path in used_files
        ]
    else:
        source_info["bytes"] = sum(path.stat().st_size for path in used_files)
        source_info["first"] = str(used_files[0].relative_to(source))
    write_json(Path(store) / "source.json", source_info)
    writer.finish()
    return len(missing_rows)


def _find_pickles(source: Path) -> dict[str, Path]:
    """Return the pickles that exist, by prefix."""
    for folder in (source, source / "full"):
        found = {prefix: folder / f"{prefix}img.pkl" for prefix in ("", "sc_", "nsc_")}
        found = {prefix: path for prefix, path in found.items() if path.is_file()}
        if found:
            return found
    candidates = sorted(source.glob("*.pkl"))
    return {"": candidates[0]} if len(candidates) == 1 and not any(source.rglob("*.npy")) else {}


def _prefix(path: str) -> str:
    return _PREFIXES.get(PurePosixPath(path).parent.name, "")


def _read_maps(origin: dict[str, Path], done: set[str]) -> Iterator[tuple[str, Array]]:
    """Yield each image with its array, file by file; files whose images are all done are not read."""
    paths_of_file: dict[Path, list[str]] = {}
    for path, file in origin.items():
        paths_of_file.setdefault(file, []).append(path)
    for file, paths in paths_of_file.items():
        if done.issuperset(paths):
            continue
        if file.suffix == ".npy":
            with wrap_errors(file, "not a complete .npy file of numbers", "fetch it again"):
                array = np.load(file, allow_pickle=False)
            yield from ((path, _to_map(array, str(file))) for path in paths)
            continue
        arrays = load_arrays(file)
        if not isinstance(arrays, dict):
            raise DiffcapError(f"{file}: expected a dict of arrays, found {type(arrays).__name__}; fetch it again.")
        keys = {path: next((key for key in _pickle_keys(path) if key in arrays), None) for path in paths}
        _refuse_missing([path for path, key in keys.items() if key is None], len(paths), file)
        for path, key in keys.items():
            yield path, _to_map(arrays[key], f"{file}, {key}")
        del arrays  # free the memory before the next pickle is read


def _pickle_keys(path: str) -> list[str]:
    """Return the possible keys of an image in a pickle."""
    image = PurePosixPath(path)
    below_root = image.relative_to(image.parts[0]) if len(image.parts) > 1 else image  # CUB has one folder per class
    padded = [f"{int(image.stem):06d}"] if image.stem.isdecimal() else []
    return [image.stem, image.name, str(below_root.with_suffix("")), str(below_root), *padded]


def _find_arrays(paths: Sequence[str], source: Path) -> dict[str, Path]:
    """Return the `.npy` of each image."""
    by_name: dict[str, list[Path]] = {}
    for file in sorted(source.rglob("*.npy")):
        by_name.setdefault(file.name, []).append(file)
    if not by_name:
        raise DiffcapError(
            f"{source}: no .npy files, no img.pkl, sc_img.pkl or nsc_img.pkl, and no single pickle there; check the folder."
        )
    found: dict[str, Path] = {}
    for path in paths:
        folders = {f"{_prefix(path)}features", PurePosixPath(path).parent.name}
        for name in _array_names(path):
            files = by_name.get(name, [])
            files = [file for file in files if file.parent.name in folders] or files
            if len(files) == 1:
                found[path] = files[0]
                break
            if len(files) > 1:
                raise DiffcapError(f"{source}: {len(files)} files are named {name}; keep one of them.")
    _refuse_missing([path for path in paths if path not in found], len(paths), source)
    return found


def _array_names(path: str) -> list[str]:
    """Return the possible names of an image's `.npy`."""
    image = PurePosixPath(path)
    padded = [f"{int(image.stem):06d}{image.suffix}.npy"] if image.stem.isdecimal() else []
    return [f"{image.name}.npy", *padded, f"{image.stem}.npy"]


def _to_map(array: Any, where: str) -> Array:
    """Convert an array of one of the three shapes above to (C, h, w)."""
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "fiu":
        raise DiffcapError(f"{where}: expected numbers, found {type(array).__name__}; fetch the file again.")
    if array.ndim == 4 and len(array) == 1:
        array = array[0]
    if array.ndim == 2 and math.isqrt(array.shape[1]) ** 2 == array.shape[1]:
        array = array.reshape(len(array), math.isqrt(array.shape[1]), -1)
    if array.ndim != 3 or not array.size:
        raise DiffcapError(f"{where}: features of {array.shape}, not (channels, rows, columns); fetch the file again.")
    return array


def _refuse_missing(missing: list[str], count: int, where: Path) -> None:
    if missing:
        raise DiffcapError(
            f"{where}: {len(missing):,} of {count:,} images have no features there (first {', '.join(missing[:3])}); fetch "
            "the missing ones, or remove these pairs from the dataset."
        )
