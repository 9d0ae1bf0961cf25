"""Features that the systems' authors extracted and handed out, into the feature store.

Two forms are read, whichever the folder holds:

* `.npy`, one array an image (SCORER, DIRL): `features/CLEVR_default_000123.png.npy`, `sc_features/...`, `nsc_features/...`, or any
  folder below the one given that holds the name once;
* pickles (IDC-PCL): `img.pkl`, `sc_img.pkl`, `nsc_img.pkl` in the folder or in its `full/`, each a dict from an image's name without
  extension to its array; or the folder's only pickle, of whatever name, for all images (those of its birds, whose name is said
  nowhere). They are read without running them (`diffcap.unpickling`), one after the other, each whole: a pickle of
  40,000 maps of 2048 x 7 x 7 in float32 takes 16 GB of memory.

An array is (C, h, w), (1, C, h, w), or (C, h * h) as IDC-PCL has it of birds.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt

from diffcap.errors import DiffcapError, wrap_errors
from diffcap.features.images import image_stamps, unique_images
from diffcap.features.store import StoreWriter
from diffcap.records import Dataset, file_hash, write_json
from diffcap.unpickling import load_arrays

Array = npt.NDArray[Any]

# Folder of an image in a manifest -> what its features' folder, and its pickle, are called.
_ROLES = {"images": "", "bef": "", "sc_images": "sc_", "aft": "sc_", "nsc_images": "nsc_"}


def fill_store(dataset: Dataset, source: str | Path, store: str | Path) -> int:
    """Put the features of every image of a dataset into a store, and `source.json`, where they come from, beside them.

    Args:
        dataset: whose images. source: folder of the authors' files. store: the store's folder.

    Returns:
        How many images were taken over now; what the store has already of the same files is kept.

    Raises:
        DiffcapError: neither form is there, a pickle asks for more than arrays, images have no features, or an array has
            another shape than the others or is none.
    """
    source, paths = Path(source), unique_images(dataset.pairs)
    if not source.is_dir():
        raise DiffcapError(f"{source}: no such folder; give the one that holds the authors' features.")
    pickles = _pickles(source)
    origin = _pickled(paths, pickles, source) if pickles else _separate(paths, source)
    done: set[str] = set()  # filled once the store is there
    parts = _from_pickles(paths, pickles, done) if pickles else _from_files(paths, origin, done)
    first = next(parts, None)
    if first is None:
        raise DiffcapError(f"{source}: no image of {dataset.name} has features there; check the folder.")
    shape = first[1].shape
    meta = {"library": "authors", "form": "pickles" if pickles else "npy"}
    writer = StoreWriter(store, paths, shape, meta, image_stamps([origin[path] for path in paths]))
    row_of = {path: row for row, path in enumerate(writer.paths)}
    missing = set(writer.missing().tolist())
    done |= {path for path in paths if row_of[path] not in missing}
    try:
        for path, array in chain([first], parts):
            if array.shape != shape:
                raise DiffcapError(
                    f"{origin[path]}: {path} has features of {array.shape}, others of {shape}; fetch it again."
                )
            if path not in done:
                writer.write(np.array([row_of[path]]), array[None])
    finally:
        writer.flush()  # a file that is refused costs nothing of the others
    taken = len(missing)
    note: dict[str, Any] = {"folder": str(source.absolute()), "form": meta["form"], "images": len(paths)}
    used = sorted(set(origin.values()))
    if pickles:
        note["files"] = [
            {"name": str(path.relative_to(source)), "bytes": path.stat().st_size, "sha256": file_hash(path)}
            for path in used
        ]
    else:
        note["bytes"] = sum(path.stat().st_size for path in used)
        note["first"] = str(used[0].relative_to(source))
    write_json(Path(store) / "source.json", note)
    writer.finish()
    return taken


def _pickles(source: Path) -> dict[str, Path]:
    """Role -> pickle, for those that are there."""
    for folder in (source, source / "full"):
        found = {role: folder / f"{role}img.pkl" for role in ("", "sc_", "nsc_")}
        found = {role: path for role, path in found.items() if path.is_file()}
        if found:
            return found
    alone = sorted(source.glob("*.pkl"))
    return {"": alone[0]} if len(alone) == 1 and not any(source.rglob("*.npy")) else {}


def _role(path: str) -> str:
    return _ROLES.get(PurePosixPath(path).parent.name, "")


def _pickled(paths: Sequence[str], pickles: dict[str, Path], source: Path) -> dict[str, Path]:
    """Image -> the pickle that should hold it."""
    lacking = {_role(path) for path in paths} - set(pickles)
    if lacking:
        names = ", ".join(sorted(f"{role}img.pkl" for role in lacking))
        raise DiffcapError(f"{source}: {names} is missing beside {next(iter(pickles.values())).name}; put it there.")
    return {path: pickles[_role(path)] for path in paths}


def _from_pickles(paths: Sequence[str], pickles: dict[str, Path], done: set[str]) -> Iterator[tuple[str, Array]]:
    for role, file in pickles.items():
        mine = [path for path in paths if _role(path) == role]
        if done.issuperset(mine):
            continue
        arrays = load_arrays(file)
        if not isinstance(arrays, dict):
            raise DiffcapError(f"{file}: expected a dict of arrays, found {type(arrays).__name__}; fetch it again.")
        keys = {path: next((key for key in _names(path) if key in arrays), None) for path in mine}
        _refuse_lacking([path for path, key in keys.items() if key is None], len(mine), file)
        for path, key in keys.items():
            yield path, _map(arrays[key], f"{file}, {key}")
        del arrays  # before the next one comes


def _names(path: str) -> list[str]:
    """What an image may be called in a pickle."""
    name = PurePosixPath(path)
    below = name.relative_to(name.parts[0]) if len(name.parts) > 1 else name  # CUB's are in folders, by class
    return [
        name.stem,
        name.name,
        str(below.with_suffix("")),
        str(below),
        *([f"{int(name.stem):06d}"] if name.stem.isdecimal() else []),
    ]


def _separate(paths: Sequence[str], source: Path) -> dict[str, Path]:
    """Image -> its `.npy`."""
    everywhere: dict[str, list[Path]] = {}
    for file in sorted(source.rglob("*.npy")):
        everywhere.setdefault(file.name, []).append(file)
    if not everywhere:
        raise DiffcapError(
            f"{source}: neither .npy files nor img.pkl, sc_img.pkl, nsc_img.pkl, nor a single pickle there; check the folder."
        )
    found: dict[str, Path] = {}
    for path in paths:
        folders = {f"{_role(path)}features", PurePosixPath(path).parent.name}
        for name in _files(path):
            files = everywhere.get(name, [])
            close = [file for file in files if file.parent.name in folders] or files
            if len(close) == 1:
                found[path] = close[0]
                break
            if len(close) > 1:
                raise DiffcapError(
                    f"{source}: {name} lies there {len(close)} times (first {close[0]}); keep one of them."
                )
    _refuse_lacking([path for path in paths if path not in found], len(paths), source)
    return found


def _files(path: str) -> list[str]:
    name = PurePosixPath(path)
    padded = [f"{int(name.stem):06d}{name.suffix}.npy"] if name.stem.isdecimal() else []
    return [f"{name.name}.npy", *padded, f"{name.stem}.npy"]


def _from_files(paths: Sequence[str], files: dict[str, Path], done: set[str]) -> Iterator[tuple[str, Array]]:
    for path in paths:
        if path in done:
            continue
        with wrap_errors(files[path], "not a whole .npy file of numbers", "fetch it again"):
            array = np.load(files[path], allow_pickle=False)
        yield path, _map(array, str(files[path]))


def _map(array: Any, where: str) -> Array:
    """(C, h, w) of any of the forms."""
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "fiu":
        raise DiffcapError(
            f"{where}: expected an array of numbers, found {type(array).__name__}; fetch the file again."
        )
    if array.ndim == 4 and len(array) == 1:
        array = array[0]
    if array.ndim == 2 and math.isqrt(array.shape[1]) ** 2 == array.shape[1]:
        array = array.reshape(len(array), math.isqrt(array.shape[1]), -1)
    if array.ndim != 3 or not array.size:
        raise DiffcapError(f"{where}: features of {array.shape}, not (channels, rows, columns); fetch the file again.")
    return array


def _refuse_lacking(lacking: list[str], count: int, where: Path) -> None:
    if lacking:
        raise DiffcapError(
            f"{where}: {len(lacking):,} of {count:,} images have no features there (first {', '.join(lacking[:3])}); fetch "
            "the missing ones, or leave those pairs out of the dataset."
        )
