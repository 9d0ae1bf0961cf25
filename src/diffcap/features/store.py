"""The feature store: one row per image of a dataset, in the folder `data/<dataset>/features/<name>/`.

| file | content |
|---|---|
| `features.f16` | array (images, C, H, W), little-endian float16 without a header; for pixels `features.u8`, uint8 |
| `index.json` | `{"paths": [...], "stamps": [...]}`: image of each row, and size and time of its file, see `image_stamps` |
| `sums.u32` | CRC-32 of each row, little-endian; checked when a row is read, and part of a training run's hash |
| `done.u8` | 1 for each row on the disk: a byte, not a bit, so that two processes never write the same byte |
| `meta.json` | format version, shape of a row, and the backbone, the hash of its weights and the preprocessing |
| `complete` | exists if all rows are done |
| `verified.json` | sizes and times of the array and of `sums.u32` after the last check of all rows |

A store of pixels with `"from_files": true` in `meta.json` has no array: each read decodes and resizes the image files, for sizes at
which an array would be too large. It returns the same values as an array. `sums.u32` has the CRC-32 of the files' contents, so that
the store stays valid if the dataset is copied or moved and its files have other times.
"""

import json
import mmap
import os
import shlex
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from diffcap.features.preprocessing import ResizeOnly, load_image
from diffcap.records import read_json, read_root
from diffcap.utils.cores import available_cores
from diffcap.utils.errors import DiffcapError

VERSION = 2
SUMS = "sums.u32"
DONE = "done.u8"
COMPLETE = "complete"
VERIFIED = "verified.json"
FROM_FILES = "from_files"  # key of `meta.json`
# "dtype" in meta.json -> file and type of the array
ARRAYS: dict[str, tuple[str, np.dtype[Any]]] = {
    "float16": ("features.f16", np.dtype("<f2")),
    "uint8": ("features.u8", np.dtype("u1")),
}
# Keys of `meta.json` that must be equal if a captioner reads another store than the one that it was trained with.
_COMPATIBILITY_KEYS = (
    *("shape", "dtype", "library", "network", "stage", "weights_sha256", "quick_gelu", "preprocessing", "pool"),
)
CHECKSUM_THREADS = 4  # a fast disk reads faster than one thread computes checksums
_DECODING_THREADS = 4  # Pillow decodes and resizes without the interpreter's lock

Rows = npt.NDArray[np.int64]
Array = npt.NDArray[Any]


def read_meta(folder: Path) -> dict[str, Any]:
    """Return the content of `meta.json`."""
    remedy = f"delete {folder} if it exists, and write it with {extract_command(folder, {})}"
    meta = read_json(folder / "meta.json", "feature store", remedy)
    if meta.get("version") != VERSION:
        raise DiffcapError(
            f"{folder}: a feature store of version {meta.get('version')}, but this program reads version {VERSION}; delete the folder "
            "and extract again."
        )
    return dict(meta)


def read_index(folder: Path) -> tuple[list[str], list[str]]:
    """Return the image path and the stamp of each row."""
    index = read_json(folder / "index.json", "index of the feature store", "delete the folder and extract again")
    return index["paths"], index["stamps"]


def read_done(folder: Path, count: int) -> npt.NDArray[np.bool_]:
    """Return which of the first `count` rows are done; rows beyond the end of the file are not."""
    done = np.zeros(count, dtype=bool)
    if (folder / DONE).is_file():
        marks = np.fromfile(folder / DONE, dtype=np.uint8, count=count)
        done[: len(marks)] = marks == 1
    return done


def mark(folder: Path, rows: Rows, done: bool) -> None:
    """Mark rows as done, or as not done, so that extraction computes them again."""
    with (folder / DONE).open("r+b", buffering=0) as file:
        for adjacent in np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1):
            os.pwrite(file.fileno(), bytes([done]) * len(adjacent), int(adjacent[0]) if len(adjacent) else 0)
        os.fdatasync(file)


def checksums(array: Array, rows: Iterable[int]) -> npt.NDArray[np.uint32]:
    """Return the CRC-32 of some rows of a C-ordered array, (n,)."""

    def checksums_of(part: Rows) -> list[int]:
        return [zlib.crc32(array[row]) for row in part]

    # The threads end with this call, because data loading workers are forked later.
    with ThreadPoolExecutor(CHECKSUM_THREADS) as pool:
        parts = pool.map(checksums_of, np.array_split(np.asarray(rows), CHECKSUM_THREADS))
        return np.array([*chain.from_iterable(parts)], dtype=np.uint32)


def check_kind(folder: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Refuse to write features into a folder that has features of another kind."""
    # Weights with another tag may be the same; their hash is compared.
    for key in sorted({*found, *wanted} - {"tag"}):
        if found.get(key) != wanted.get(key):
            raise DiffcapError(
                f"{folder}: holds features of another kind ({key} there is {_shorten_json(found.get(key))}, now "
                f"{_shorten_json(wanted.get(key))}); use the same settings as before, delete the folder, or choose another name."
            )


def _shorten_json(value: Any) -> str:
    text = json.dumps(value, sort_keys=True)
    return text if len(text) <= 100 else text[:97] + "..."


def extract_command(folder: Path, meta: Mapping[str, Any]) -> str:
    """Return the command that computes the missing features of a store, for messages."""
    dataset = folder.parent.parent
    name = folder.name
    data = f"DATASET={dataset.name}" if dataset.parent == Path("data") else f"FOLDER={shlex.quote(str(dataset))}"
    if meta.get(FROM_FILES):
        height, width = meta["preprocessing"]["size"]
        other_name = f" FEATURES={name}" if name != "files" else ""
        return f'`make extract {data} BACKBONE=files{other_name} ARGS="--model.image_size=[{height},{width}]"`'
    if meta.get("library") == "authors":
        source_file = folder / "source.json"
        source = shlex.quote(read_json(source_file)["folder"]) if source_file.is_file() else "<the authors' folder>"
        return f"`make extract {data} FEATURES={name} FEATURES_FROM={source}`"
    if Path("configs/backbone", f"{name}.yaml").is_file():
        return f"`make extract {data} BACKBONE={name}`"
    return f"`make extract {data} FEATURES={name}` with the same BACKBONE= and WEIGHTS= as before"


def file_size(path: Path) -> int:
    """Return the size of a file in bytes; 0 if there is none."""
    return path.stat().st_size if path.is_file() else 0


def read_content(file: Path) -> bytes:
    """Return the content of an image file of the dataset."""
    try:
        return file.read_bytes()
    except OSError as error:
        raise DiffcapError(f"{file}: cannot be read ({error.strerror}); fetch the file again.") from None


class FeatureStore(ABC):
    """A complete store, read-only; create it with `open`."""

    def __init__(self, folder: Path, meta: dict[str, Any], paths: list[str]) -> None:
        self.folder = folder
        self.meta = meta  # content of `meta.json`
        self._paths = paths
        channels, height, width = meta["shape"]
        self.shape = channels, height, width  # of one image
        self.dtype = ARRAYS[meta["dtype"]][1]  # float16, or uint8 for pixels
        self._row_of = {path: row for row, path in enumerate(paths)}

    @staticmethod
    def open(folder: str | Path, trained_on: Mapping[str, Any] | None = None) -> "FeatureStore":
        """Open a complete store; with `trained_on` (`meta` of a captioner's store) only if its features are of the same kind."""
        folder = Path(folder)
        meta = read_meta(folder)
        for key in _COMPATIBILITY_KEYS:
            if trained_on is None or (key == "weights_sha256" and trained_on.get(key) is None):
                continue  # the hash of an imported captioner is unknown
            if meta.get(key) != trained_on.get(key):
                raise DiffcapError(
                    f"{folder}: its features have {key} {_shorten_json(meta.get(key))}, the captioner was trained on "
                    f"{_shorten_json(trained_on.get(key))}; extract with that backbone and its weights."
                )
        paths, stamps = read_index(folder)
        if meta.get(FROM_FILES):
            return _ImageFileStore(folder, meta, paths, stamps)
        return _ArrayStore(folder, meta, paths)

    def __len__(self) -> int:
        return len(self._row_of)

    def rows(self, paths: Sequence[str]) -> Rows:
        """Return the row numbers of n image paths (as in the manifest), (n,) int64."""
        try:
            return np.fromiter((self._row_of[path] for path in paths), dtype=np.int64, count=len(paths))
        except KeyError as error:
            unknown = sum(path not in self._row_of for path in paths)
            raise self._incomplete(
                f"{unknown} of {len(paths)} images have no features there, the first is {error.args[0]}"
            ) from None

    def read(self, rows: Rows, out: Array | None = None) -> Array:
        """Copy rows (n,) out of the store to (n, C, H, W) of `dtype`, `out` or a new array, and compare them with their checksums.

        A row that differs is an error. Then the store is marked as incomplete, and the next extraction computes the row again.
        """
        out = np.empty((len(rows), *self.shape), dtype=self.dtype) if out is None else out
        self._read_into(out, np.asarray(rows, dtype=np.int64))
        return out

    @abstractmethod
    def _read_into(self, out: Array, rows: Rows) -> None: ...

    def _incomplete(self, fault: str) -> DiffcapError:
        command = extract_command(self.folder, self.meta)
        return DiffcapError(f"{self.folder}: {fault}; run {command}, which computes only what is missing.")


class _ArrayStore(FeatureStore):
    """A store with an array, which is memory-mapped. A row is compared with its checksum when it is read for the first time."""

    def __init__(self, folder: Path, meta: dict[str, Any], paths: list[str]) -> None:
        super().__init__(folder, meta, paths)
        done = read_done(folder, len(paths))
        if not (folder / COMPLETE).is_file():
            raise self._incomplete(f"extraction is not complete ({done.sum()} of {len(paths)} images done)")
        if not done.all():  # rows of images that the dataset had before
            self._row_of = {path: row for path, row in self._row_of.items() if done[row]}
        self._array = self._open_memmap(folder / ARRAYS[meta["dtype"]][0], self.dtype, self.shape)
        self._sums = self._open_memmap(folder / SUMS, np.dtype("<u4"), ())
        # In shared memory, so that forked data loading workers check each row only once.
        self._verified = np.frombuffer(mmap.mmap(-1, max(1, len(paths))), dtype=np.bool_)

    def _open_memmap(self, file: Path, dtype: np.dtype[Any], row_shape: tuple[int, ...]) -> Array:
        shape = (len(self._paths), *row_shape)
        needed = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if file_size(file) < needed:
            raise self._incomplete(f"{file.name}: truncated, {file_size(file)} bytes, but {needed} are needed")
        return np.memmap(file, dtype=dtype, mode="r", shape=shape).view(np.ndarray)  # slices of a memmap are slower

    def _read_into(self, out: Array, rows: Rows) -> None:
        for index in np.argsort(rows, kind="stable").tolist():  # reading in ascending order is faster
            out[index] = self._array[rows[index]]
        unverified = np.flatnonzero(~self._verified[rows])  # indices in `rows`
        if not len(unverified):
            return
        damaged = rows[unverified][checksums(out, unverified) != self._sums[rows[unverified]]]
        if len(damaged):
            with suppress(OSError):  # the store may be read-only
                (self.folder / VERIFIED).unlink(missing_ok=True)  # so that the next extraction checks all rows
                mark(self.folder, np.unique(damaged), done=False)
                (self.folder / COMPLETE).unlink(missing_ok=True)
            raise self._incomplete(
                f"the features of {self._paths[damaged.min()]} are damaged (they do not match their checksum in {SUMS})"
            )
        self._verified[rows[unverified]] = True


class _ImageFileStore(FeatureStore):
    """A store without an array: pixels are decoded and resized each time they are read."""

    def __init__(self, folder: Path, meta: dict[str, Any], paths: list[str], stamps: list[str]) -> None:
        super().__init__(folder, meta, paths)
        if not (folder / COMPLETE).is_file():
            raise self._incomplete("the image files have changed, or were not all read")
        if file_size(folder / SUMS) != 4 * len(paths):
            raise self._incomplete(f"{SUMS}: damaged, it must have 4 bytes per image")
        self._sums = np.fromfile(folder / SUMS, dtype="<u4")
        fields = enumerate(stamp.split() for stamp in stamps)  # size, time[, lowest value, highest value]
        self._ranges = {row: (json.loads(field[2]), json.loads(field[3])) for row, field in fields if len(field) == 4}
        self._root = read_root(folder.parent.parent)
        height, width = meta["preprocessing"]["size"]
        self._preprocess = ResizeOnly((height, width))

    def _read_into(self, out: Array, rows: Rows) -> None:
        # The threads end with this call, because data loading workers are forked later.
        with ThreadPoolExecutor(min(_DECODING_THREADS, available_cores())) as pool:
            list(pool.map(self._decode_into, out, rows))

    def _decode_into(self, out: Array, row: int) -> None:
        file = self._root / self._paths[row]
        content = read_content(file)
        if zlib.crc32(content) != self._sums[row]:
            with suppress(OSError):  # the store may be read-only
                (self.folder / COMPLETE).unlink(missing_ok=True)
            raise DiffcapError(
                f"{file}: the image has changed since `make extract` (its checksum is not the one in {self.folder / SUMS}); run "
                f"{extract_command(self.folder, self.meta)}, then this command again."
            )
        out[:] = self._preprocess.pixels(load_image(content, str(file), self._ranges.get(row))).numpy()
