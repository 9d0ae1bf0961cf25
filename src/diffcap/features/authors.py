"""Fill a feature store, the folder with the features of a dataset, with features that the authors of a method have published.

The authors' folder has one of two formats:

* `.npy` (methods SCORER, DIRL): one file per image, such as `features/CLEVR_default_000123.png.npy`. The file is in the folder
  `features`, `sc_features` or `nsc_features`, or in any folder if its name is unique;
* pickles (IDC-PCL): `img.pkl`, `sc_img.pkl` and `nsc_img.pkl` in the authors' folder or in its subfolder `full`, or a single pickle
  with any name (Birds-to-Words). Each is a dict from image name without extension to array. A pickle is read as a whole, without
  executing code: 40,000 maps of 2048 x 7 x 7 in float32 need 16 GB of memory.

The array of an image is its feature map: (C, h, w), (1, C, h, w), or (C, h * h) in IDC-PCL's features for Birds-to-Words.
"""

from collections.abc import Iterator, Sequence
from itertools import chain
from math import isqrt
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from diffcap.features.images import file_stamps, unique_images
from diffcap.features.store import Array
from diffcap.features.writer import StoreWriter
from diffcap.records import Dataset, file_hash, write_json
from diffcap.utils.errors import DiffcapError, wrap_errors
from diffcap.utils.unpickling import load_arrays

# Folder of an image -> prefix of the folder or pickle with its features: "sc_" after a change, "nsc_" if only the camera has moved.
_PREFIXES = {"images": "", "bef": "", "sc_images": "sc_", "aft": "sc_", "nsc_images": "nsc_"}


def fill_store(dataset: Dataset, authors_folder: str | Path, store_folder: str | Path) -> int:
    """Import the features of all images of a dataset from the authors' folder, and list the authors' files in the store's `source.json`.

    Returns the number of imported images. An image is not imported again if the store has its features from the same file.
    """
    authors_folder = Path(authors_folder)
    image_paths = unique_images(dataset.pairs)
    if not authors_folder.is_dir():
        raise DiffcapError(f"{authors_folder}: no such folder; give the folder of the authors' features.")
    pickles = _find_pickles(authors_folder)
    if pickles and (missing_prefixes := {_prefix_of(path) for path in image_paths} - set(pickles)):
        names = ", ".join(sorted(f"{prefix}img.pkl" for prefix in missing_prefixes))
        raise DiffcapError(
            f"{authors_folder}: {names} is missing; put it into the same folder as {next(iter(pickles.values())).name}."
        )
    feature_files = {path: pickles[_prefix_of(path)] for path in image_paths if pickles}
    feature_files = feature_files or _find_npy_files(image_paths, authors_folder)
    stored_images: set[str] = set()  # filled below: opening the store needs the shape of the first map
    feature_maps = _read_feature_maps(feature_files, stored_images)
    first_image, first_map = next(feature_maps)
    shape = first_map.shape
    meta = {"library": "authors", "form": "pickles" if pickles else "npy"}
    stamps = file_stamps([feature_files[path] for path in image_paths])  # sizes and times, to find changed files
    writer = StoreWriter(store_folder, image_paths, shape, meta, stamps)
    row_of = {path: row for row, path in enumerate(writer.image_paths)}
    missing_rows = set(writer.missing_rows().tolist())
    stored_images |= {path for path in image_paths if row_of[path] not in missing_rows}
    try:
        for path, feature_map in chain([(first_image, first_map)], feature_maps):
            file = feature_files[path]
            if feature_map.shape != shape:
                raise DiffcapError(f"{file}: features of {feature_map.shape}, expected {shape}; fetch it again.")
            if path not in stored_images:
                writer.write(np.array([row_of[path]]), feature_map[None])
    finally:
        writer.flush()  # if a file is invalid, the features from the files before it are kept
    num_images = len(image_paths)
    info: dict[str, Any] = {"folder": str(authors_folder.absolute()), "form": meta["form"], "images": num_images}
    used_files = sorted(set(feature_files.values()))
    if pickles:
        info["files"] = [
            {"name": str(file.relative_to(authors_folder)), "bytes": file.stat().st_size, "sha256": file_hash(file)}
            for file in used_files
        ]
    else:
        info["bytes"] = sum(file.stat().st_size for file in used_files)
        info["first"] = str(used_files[0].relative_to(authors_folder))
    write_json(Path(store_folder) / "source.json", info)
    writer.finish()
    return len(missing_rows)


def _find_pickles(authors_folder: Path) -> dict[str, Path]:
    """Return the pickles that exist: prefix ("", "sc_" or "nsc_") of their images -> file."""
    for folder in (authors_folder, authors_folder / "full"):
        pickles = {prefix: folder / f"{prefix}img.pkl" for prefix in ("", "sc_", "nsc_")}
        pickles = {prefix: file for prefix, file in pickles.items() if file.is_file()}
        if pickles:
            return pickles
    candidates = sorted(authors_folder.glob("*.pkl"))
    return {"": candidates[0]} if len(candidates) == 1 and not any(authors_folder.rglob("*.npy")) else {}


def _prefix_of(image_path: str) -> str:
    return _PREFIXES.get(PurePosixPath(image_path).parent.name, "")


def _read_feature_maps(feature_files: dict[str, Path], stored_images: set[str]) -> Iterator[tuple[str, Array]]:
    """Yield each image path with its feature map, file by file; a file is skipped if all its images are in `stored_images`."""
    images_of_file: dict[Path, list[str]] = {}
    for path, file in feature_files.items():
        images_of_file.setdefault(file, []).append(path)
    for file, image_paths in images_of_file.items():
        if stored_images.issuperset(image_paths):
            continue
        if file.suffix == ".npy":
            with wrap_errors(file, "not a complete .npy file of numbers", "fetch it again"):
                array = np.load(file, allow_pickle=False)
            yield from ((path, _to_feature_map(array, str(file))) for path in image_paths)
            continue
        arrays = load_arrays(file)
        if not isinstance(arrays, dict):
            raise DiffcapError(f"{file}: expected a dict of arrays, found {type(arrays).__name__}; fetch it again.")
        keys = {path: next((key for key in _pickle_keys(path) if key in arrays), None) for path in image_paths}
        _refuse_missing([path for path, key in keys.items() if key is None], len(image_paths), file)
        for path, key in keys.items():
            yield path, _to_feature_map(arrays[key], f"{file}, {key}")
        del arrays  # free the memory before the next pickle is read


def _pickle_keys(image_path: str) -> list[str]:
    """Return the keys that an image may have in a pickle. If its name is a number, one key has six digits ("000007")."""
    path = PurePosixPath(image_path)
    # The dataset CUB has a folder for each class of birds: "images/001.Albatross/0007.jpg" -> "001.Albatross/0007.jpg".
    class_path = path.relative_to(path.parts[0]) if len(path.parts) > 1 else path
    padded = [f"{int(path.stem):06d}"] if path.stem.isdecimal() else []
    return [path.stem, path.name, str(class_path.with_suffix("")), str(class_path), *padded]


def _find_npy_files(image_paths: Sequence[str], authors_folder: Path) -> dict[str, Path]:
    """Return the `.npy` file of each image. If an image's name is a number, the file's name may have six digits ("000007.png.npy")."""
    files_of_name: dict[str, list[Path]] = {}
    for file in sorted(authors_folder.rglob("*.npy")):
        files_of_name.setdefault(file.name, []).append(file)
    if not files_of_name:
        raise DiffcapError(
            f"{authors_folder}: no .npy files, no img.pkl, sc_img.pkl or nsc_img.pkl, and no single pickle there; check the folder."
        )
    npy_files: dict[str, Path] = {}
    for image_path in image_paths:
        path = PurePosixPath(image_path)
        likely_folders = {f"{_prefix_of(image_path)}features", path.parent.name}
        padded = [f"{int(path.stem):06d}{path.suffix}.npy"] if path.stem.isdecimal() else []
        for name in (f"{path.name}.npy", *padded, f"{path.stem}.npy"):
            files = files_of_name.get(name, [])
            files = [file for file in files if file.parent.name in likely_folders] or files
            if len(files) == 1:
                npy_files[image_path] = files[0]
                break
            if len(files) > 1:
                raise DiffcapError(f"{authors_folder}: {len(files)} files are named {name}; keep one of them.")
    _refuse_missing([path for path in image_paths if path not in npy_files], len(image_paths), authors_folder)
    return npy_files


def _to_feature_map(array: Any, place: str) -> Array:
    """Convert an array of one of the shapes at the top of this module to (C, h, w); messages name `place` (file and key)."""
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "fiu":
        raise DiffcapError(f"{place}: expected numbers, found {type(array).__name__}; fetch the file again.")
    if array.ndim == 4 and len(array) == 1:
        array = array[0]
    if array.ndim == 2 and isqrt(array.shape[1]) ** 2 == array.shape[1]:
        array = array.reshape(len(array), isqrt(array.shape[1]), -1)
    if array.ndim != 3 or not array.size:
        raise DiffcapError(f"{place}: features of {array.shape}, not (channels, rows, columns); fetch the file again.")
    return array


def _refuse_missing(missing_images: list[str], num_images: int, place: Path) -> None:
    if missing_images:
        raise DiffcapError(
            f"{place}: {len(missing_images):,} of {num_images:,} images have no features there (first "
            f"{', '.join(missing_images[:3])}); fetch the missing ones, or remove these pairs from the dataset."
        )
