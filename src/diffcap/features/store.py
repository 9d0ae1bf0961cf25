"""The feature store: one row per image of a dataset, in the folder `data/<dataset>/features/<name>/`.

| file | content |
|---|---|
| `features.f16` | array (images, C, H, W), little-endian float16 without a header; `features.u8` (uint8) if the features are pixels |
| `index.json` | `{"paths": [...], "stamps": [...]}`: path of each row's image; size and time of the image file (its stamp) |
| `sums.u32` | CRC-32 of each row, little-endian, compared when the row is read; a resumed training must find this file unchanged |
| `done.u8` | 1 for each row that is done (on the disk); a byte per row, so that two processes never write the same byte |
| `meta.json` | format version, shape of a row, backbone, hash of the backbone's weights, preprocessing |
| `complete` | exists if all rows are done |
| `verified.json` | sizes and times of the array's file and of `sums.u32` when all rows were last known to match their CRC-32 |

A store of pixels with `"from_files": true` in `meta.json` has no array, because the array of large images would be too large. Each
read decodes and resizes the image files, which gives the same values. In such a store, `sums.u32` has the CRC-32 of each image file.
So the store stays valid if the dataset is copied, although copying changes the times of the files.
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
from diffcap.records import JsonDict, read_json, read_root
from diffcap.utils.cores import available_cores
from diffcap.utils.errors import DiffcapError
from diffcap.utils.settings import backbones

FORMAT_VERSION = 2  # "version" in `meta.json`
CHECKSUM_FILE = "sums.u32"
DONE_FILE = "done.u8"
COMPLETE_FILE = "complete"
VERIFIED_FILE = "verified.json"
FROM_FILES_KEY = "from_files"  # key of `meta.json`
# "dtype" in `meta.json` -> name of the array's file, and the type of its values
ARRAY_FILES: dict[str, tuple[str, np.dtype]] = {
    "float16": ("features.f16", np.dtype("<f2")),
    "uint8": ("features.u8", np.dtype("u1")),
}
# Keys of `meta.json` whose values must be equal in the store that a captioner reads and in the store that it was trained with.
_COMPATIBILITY_KEYS = (
    *("shape", "dtype", "library", "network", "stage", "weights_sha256", "quick_gelu", "preprocessing", "pool"),
)
CHECKSUM_THREADS = 4  # a fast disk reads faster than one thread computes checksums
_DECODING_THREADS = 4  # useful, because Pillow releases the GIL while it decodes and resizes

RowNumbers = npt.NDArray[np.int64]
Array = npt.NDArray[Any]


def read_meta(folder: Path) -> JsonDict:
    """Return the content of `meta.json`."""
    remedy = f"delete {folder} if it exists, and write it with {extract_command(folder, {})}"
    meta = read_json(folder / "meta.json", "feature store", remedy)
    if meta.get("version") != FORMAT_VERSION:
        raise DiffcapError(
            f"{folder}: a feature store of version {meta.get('version')}, but this program reads version {FORMAT_VERSION}; delete "
            "the folder and extract again."
        )
    return dict(meta)


def read_index(folder: Path) -> tuple[list[str], list[str]]:
    """Return the image path and the stamp of each row."""
    index = read_json(folder / "index.json", "index of the feature store", "delete the folder and extract again")
    return index["paths"], index["stamps"]


def read_done_rows(folder: Path, num_rows: int) -> npt.NDArray[np.bool_]:
    """Return for each of the first `num_rows` rows if it is done, (num_rows,). Rows beyond the end of `done.u8` are not done."""
    is_done = np.zeros(num_rows, dtype=bool)
    if (folder / DONE_FILE).is_file():
        done_bytes = np.fromfile(folder / DONE_FILE, dtype=np.uint8, count=num_rows)
        is_done[: len(done_bytes)] = done_bytes == 1
    return is_done


def mark_rows(folder: Path, rows: RowNumbers, done: bool) -> None:
    """Mark rows as done, or as not done, so that extraction computes them again."""
    with (folder / DONE_FILE).open("r+b", buffering=0) as file:
        for adjacent_rows in np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1):
            first_row = int(adjacent_rows[0]) if len(adjacent_rows) else 0
            os.pwrite(file.fileno(), bytes([done]) * len(adjacent_rows), first_row)
        os.fdatasync(file)


def compute_checksums(array: Array, rows: Iterable[int]) -> npt.NDArray[np.uint32]:
    """Return the CRC-32 of n rows of a C-ordered array, (n,)."""
    # The threads end with this call: they must not exist when data loading workers are forked.
    with ThreadPoolExecutor(CHECKSUM_THREADS) as pool:
        row_parts = np.array_split(np.asarray(rows), CHECKSUM_THREADS)
        checksum_parts = pool.map(lambda part: [zlib.crc32(array[row]) for row in part], row_parts)
        return np.array([*chain.from_iterable(checksum_parts)], dtype=np.uint32)


def check_same_meta(folder: Path, old_meta: Mapping[str, Any], new_meta: Mapping[str, Any]) -> None:
    """Raise an error if features that `new_meta` describes do not belong in the store in `folder`, whose `meta.json` is `old_meta`."""
    # The tag, which is a name of the weights, may differ, because the hash of the weights is compared.
    for key in sorted({*old_meta, *new_meta} - {"tag"}):
        if old_meta.get(key) != new_meta.get(key):
            raise DiffcapError(
                f"{folder}: holds features of another kind ({key} there is {_shorten_json(old_meta.get(key))}, now "
                f"{_shorten_json(new_meta.get(key))}); use the same settings as before, delete the folder, or choose another name."
            )


def _shorten_json(value: Any) -> str:
    text = json.dumps(value, sort_keys=True)
    return text if len(text) <= 100 else text[:97] + "..."


def extract_command(folder: Path, meta: Mapping[str, Any]) -> str:
    """Return the command, for messages, that computes the missing features of the store in `folder`, whose `meta.json` is `meta`."""
    dataset_folder = folder.parent.parent
    name = folder.name
    command = f"make extract FOLDER={shlex.quote(str(dataset_folder))}"
    if dataset_folder.parent == Path("data"):
        command = f"make extract DATASET={dataset_folder.name}"
    if meta.get(FROM_FILES_KEY):
        height, width = meta["preprocessing"]["size"]
        other_name = f" FEATURES={name}" if name != "files" else ""
        return f'`{command} BACKBONE=files{other_name} ARGS="--model.image_size=[{height},{width}]"`'
    if meta.get("library") == "authors":
        source_file = folder / "source.json"
        source = shlex.quote(read_json(source_file)["folder"]) if source_file.is_file() else "<the authors' folder>"
        return f"`{command} FEATURES={name} FEATURES_FROM={source}`"
    if name in backbones():
        return f"`{command} BACKBONE={name}`"
    return f"`{command} FEATURES={name}` with the same BACKBONE= and WEIGHTS= as before"


def file_size(path: Path) -> int:
    """Return the size of a file in bytes; 0 for a missing file."""
    return path.stat().st_size if path.is_file() else 0


def read_content(file: Path) -> bytes:
    """Return the content of an image file of the dataset."""
    try:
        return file.read_bytes()
    except OSError as error:
        raise DiffcapError(f"{file}: cannot be read ({error.strerror}); fetch the file again.") from None


class FeatureStore(ABC):
    """Reads a complete store. `FeatureStore.open` returns the object; `StoreWriter` writes the store's files."""

    def __init__(self, folder: Path, meta: JsonDict, paths: list[str]) -> None:
        self.folder = folder
        self.meta = meta  # content of `meta.json`
        self._paths = paths
        channels, height, width = meta["shape"]
        self.shape = channels, height, width  # shape of one image's features
        self.dtype = ARRAY_FILES[meta["dtype"]][1]  # float16, or uint8 for pixels
        self._row_of = {path: row for row, path in enumerate(paths)}

    @staticmethod
    def open(folder: str | Path, captioner_meta: Mapping[str, Any] | None = None) -> "FeatureStore":
        """Open a complete store.

        If a captioner reads the store, `captioner_meta` is the `meta.json` of its training's store; both must have features of one kind.
        """
        folder = Path(folder)
        meta = read_meta(folder)
        for key in _COMPATIBILITY_KEYS:
            if captioner_meta is None or (key == "weights_sha256" and captioner_meta.get(key) is None):
                continue  # the hash is unknown if the captioner was imported from its authors' checkpoint
            if meta.get(key) != captioner_meta.get(key):
                raise DiffcapError(
                    f"{folder}: its features have {key} {_shorten_json(meta.get(key))}, the captioner was trained on "
                    f"{_shorten_json(captioner_meta.get(key))}; extract with that backbone and its weights."
                )
        paths, stamps = read_index(folder)
        if meta.get(FROM_FILES_KEY):
            return _ImageFileStore(folder, meta, paths, stamps)
        return _ArrayStore(folder, meta, paths)

    def __len__(self) -> int:
        return len(self._row_of)

    def rows(self, paths: Sequence[str]) -> RowNumbers:
        """Return the row numbers, (n,) int64, of n image paths, which are written as in `manifest.jsonl`, the dataset's list of pairs."""
        try:
            return np.fromiter((self._row_of[path] for path in paths), dtype=np.int64, count=len(paths))
        except KeyError as error:
            num_unknown = sum(path not in self._row_of for path in paths)
            raise self._incomplete_error(
                f"{num_unknown} of {len(paths)} images have no features there, the first is {error.args[0]}"
            ) from None

    def read(self, rows: RowNumbers, out: Array | None = None) -> Array:
        """Copy rows (n,) of the store into `out` or a new array, (n, C, H, W) of `dtype`, and compare them with their checksums.

        If a row differs, the store is marked as incomplete, so that the next extraction computes the row again, and an error is raised.
        """
        out = np.empty((len(rows), *self.shape), dtype=self.dtype) if out is None else out
        self._read_into(out, np.asarray(rows, dtype=np.int64))
        return out

    @abstractmethod
    def _read_into(self, out: Array, rows: RowNumbers) -> None: ...

    def _incomplete_error(self, fault: str) -> DiffcapError:
        command = extract_command(self.folder, self.meta)
        return DiffcapError(f"{self.folder}: {fault}; run {command}, which computes only what is missing.")


class _ArrayStore(FeatureStore):
    """A store with an array, which is memory-mapped. A row is compared with its checksum when it is read for the first time."""

    def __init__(self, folder: Path, meta: JsonDict, paths: list[str]) -> None:
        super().__init__(folder, meta, paths)
        is_done = read_done_rows(folder, len(paths))
        if not (folder / COMPLETE_FILE).is_file():
            raise self._incomplete_error(f"extraction is not complete ({is_done.sum()} of {len(paths)} images done)")
        if not is_done.all():  # rows that are not done belong to images that are no longer in the dataset
            self._row_of = {path: row for path, row in self._row_of.items() if is_done[row]}
        self._array = self._open_memmap(folder / ARRAY_FILES[meta["dtype"]][0], self.dtype, self.shape)
        self._checksums = self._open_memmap(folder / CHECKSUM_FILE, np.dtype("<u4"), ())
        # This array is in shared memory, so that forked data loading workers check each row only once.
        self._is_verified = np.frombuffer(mmap.mmap(-1, max(1, len(paths))), dtype=np.bool_)

    def _open_memmap(self, file: Path, dtype: np.dtype[Any], row_shape: tuple[int, ...]) -> Array:
        shape = (len(self._paths), *row_shape)
        min_size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if file_size(file) < min_size:
            raise self._incomplete_error(f"{file.name}: truncated, {file_size(file)} bytes, but {min_size} are needed")
        return np.memmap(file, dtype=dtype, mode="r", shape=shape).view(np.ndarray)  # slices of a memmap are slower

    def _read_into(self, out: Array, rows: RowNumbers) -> None:
        for index in np.argsort(rows, kind="stable").tolist():  # reading in ascending order is faster
            out[index] = self._array[rows[index]]
        unverified = np.flatnonzero(~self._is_verified[rows])  # indices in `rows`
        if not len(unverified):
            return
        damaged_rows = rows[unverified][compute_checksums(out, unverified) != self._checksums[rows[unverified]]]
        if len(damaged_rows):
            with suppress(OSError):  # the store may be read-only
                (self.folder / VERIFIED_FILE).unlink(missing_ok=True)  # so that the next extraction checks all rows
                mark_rows(self.folder, np.unique(damaged_rows), done=False)
                (self.folder / COMPLETE_FILE).unlink(missing_ok=True)
            raise self._incomplete_error(
                f"the features of {self._paths[damaged_rows.min()]} are damaged (they do not match their checksum in {CHECKSUM_FILE})"
            )
        self._is_verified[rows[unverified]] = True


class _ImageFileStore(FeatureStore):
    """A store without an array: pixels are decoded and resized each time they are read."""

    def __init__(self, folder: Path, meta: JsonDict, paths: list[str], stamps: list[str]) -> None:
        super().__init__(folder, meta, paths)
        if not (folder / COMPLETE_FILE).is_file():
            raise self._incomplete_error("the image files have changed, or were not all read")
        if file_size(folder / CHECKSUM_FILE) != 4 * len(paths):
            raise self._incomplete_error(f"{CHECKSUM_FILE}: damaged, it must have 4 bytes per image")
        self._checksums = np.fromfile(folder / CHECKSUM_FILE, dtype="<u4")
        # A stamp is the size and time of the file; for an image with more than 8 bits, the value range of its pair follows.
        fields = enumerate(stamp.split() for stamp in stamps)
        self._ranges = {row: tuple(map(json.loads, field[2:])) for row, field in fields if field[2:]}
        self._root = read_root(folder.parent.parent)
        self._preprocess = ResizeOnly((*meta["preprocessing"]["size"],))

    def _read_into(self, out: Array, rows: RowNumbers) -> None:
        # The threads end with this call: they must not exist when data loading workers are forked.
        with ThreadPoolExecutor(min(_DECODING_THREADS, available_cores())) as pool:
            list(pool.map(self._decode_into, out, rows))

    def _decode_into(self, out: Array, row: int) -> None:
        file = self._root / self._paths[row]
        content = read_content(file)
        if zlib.crc32(content) != self._checksums[row]:
            with suppress(OSError):  # the store may be read-only
                (self.folder / COMPLETE_FILE).unlink(missing_ok=True)
            raise DiffcapError(
                f"{file}: the image has changed since `make extract` (its checksum is not the one in {self.folder / CHECKSUM_FILE}); run "
                f"{extract_command(self.folder, self.meta)}, then this command again."
            )
        out[:] = self._preprocess.pixels(load_image(content, str(file), self._ranges.get(row))).numpy()
