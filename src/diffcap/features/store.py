"""The feature store: a memory-mapped array with the features of all images of a dataset.

A store of pixels may also have no array and read the image files themselves, see `diffcap.features.files`.

Several processes can write it at the same time. A store is a folder of files, `data/<dataset>/features/<name>/`:

| file | content |
|---|---|
| `features.f16` | array (images, C, H, W), little-endian float16 in C order, no header; for pixels `features.u8`, uint8 |
| `index.json` | `{"paths": [...], "stamps": [...]}`: row i is of the image `paths[i]`; `stamps[i]` is its file's size and time |
| `sums.u32` | CRC-32 of each row, little-endian; checked when a row is read, and part of a training run's hash |
| `done.u8` | one byte per row, 1 if the row is on the disk; not one bit, so that two processes never write the same byte |
| `meta.json` | format version, shape of a row, and the backbone, the hash of its weights and the preprocessing |
| `complete` | exists if all rows are done |
| `verified.json` | sizes and modification times of the array and of `sums.u32` after the last check of all rows |
"""

import fcntl
import json
import mmap
import os
import shlex
import time
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from diffcap.records import read_json, write_json, write_text
from diffcap.utils.errors import DiffcapError

VERSION = 2
SUMS = "sums.u32"
COMPLETE = "complete"
FROM_FILES = "from_files"  # key of `meta.json`: true if the store has no array
_VERIFIED = "verified.json"
# "dtype" in meta.json -> type and file of the array
_DTYPES: dict[str, np.dtype[Any]] = {"float16": np.dtype("<f2"), "uint8": np.dtype("u1")}
_FILES = {"float16": "features.f16", "uint8": "features.u8"}
# Keys of `meta.json` that must be equal if a captioner reads another store than the one that it was trained with.
_COMPATIBILITY_KEYS = (
    "shape",
    "dtype",
    "library",
    "network",
    "stage",
    "weights_sha256",
    "quick_gelu",
    "preprocessing",
    "pool",
)
_FLOAT16_MAX = float(np.finfo(np.float16).max)
# The data are synchronised with the disk after this many bytes or seconds, and only then are the rows marked as done. With a
# fast device, synchronising after every batch would take longer than computing the batch.
_SYNC_BYTES = 64 << 20
_SYNC_SECONDS = 0.5
CHECKSUM_THREADS = 4  # a fast disk reads faster than one thread computes checksums
_PROGRESS_BYTES = 64 << 20  # bytes checked per update of the progress bar

Rows = npt.NDArray[np.int64]


def read_meta(folder: Path) -> dict[str, Any]:
    """Return the content of `meta.json`."""
    remedy = f"delete {folder} if it exists, and write it with {extract_command(folder, {})}"
    meta = read_json(folder / "meta.json", "feature store", remedy)
    version = meta.get("version") if isinstance(meta, dict) else None
    if version != VERSION:
        raise DiffcapError(
            f"{folder}: a feature store of version {version}, but this program reads version {VERSION}; delete the folder "
            "and extract again."
        )
    return dict(meta)


def read_index(folder: Path) -> tuple[list[str], list[str]]:
    """Return the image path and the stamp of each row."""
    index = read_json(folder / "index.json", "index of the feature store", "delete the folder and extract again")
    try:
        paths, stamps = index["paths"], index["stamps"]
    except (KeyError, TypeError):
        raise DiffcapError(
            f'{folder / "index.json"}: "paths" or "stamps" is missing; delete {folder} and extract again.'
        ) from None
    return list(paths), list(stamps)


def _read_done(folder: Path, count: int) -> npt.NDArray[np.bool_]:
    """Return which of the first `count` rows are done; a row beyond the end of the file is not done."""
    done = np.zeros(count, dtype=bool)
    path = folder / "done.u8"
    if path.is_file():
        found = np.fromfile(path, dtype=np.uint8, count=count)
        done[: len(found)] = found == 1
    return done


def _mark_not_done(folder: Path, rows: Rows) -> None:
    """Mark rows as not done, so that extraction computes them again."""
    with (folder / "done.u8").open("r+b") as file:
        for row in rows.tolist():
            file.seek(row)
            file.write(b"\0")
        file.flush()
        os.fdatasync(file.fileno())


def _checksums(array: npt.NDArray[Any], rows: Rows) -> npt.NDArray[np.uint32]:
    """CRC-32 of some rows of a C-ordered array, (n,)."""

    def checksums_of(part: Rows) -> list[int]:
        return [zlib.crc32(array[row]) for row in part]

    # The threads end with this call, because data loading workers are forked later.
    with ThreadPoolExecutor(CHECKSUM_THREADS) as pool:
        parts = pool.map(checksums_of, np.array_split(rows, CHECKSUM_THREADS))
        return np.array([checksum for part in parts for checksum in part], dtype=np.uint32)


def check_kind(folder: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Check that a store's `meta.json` is the one that is about to be written."""
    # The tag says where the weights come from; their hash says what they are.
    differing = sorted(key for key in {*found, *wanted} - {"tag"} if found.get(key) != wanted.get(key))
    if differing:
        key = differing[0]  # the first is enough: for another network, most keys differ
        raise DiffcapError(
            f"{folder}: holds features of another kind ({key} there is {_short(found.get(key))}, now "
            f"{_short(wanted.get(key))}); use the same settings as before, delete the folder, or choose another name."
        )


def file_size(path: Path) -> int:
    """Size of a file in bytes; 0 if there is none."""
    return path.stat().st_size if path.is_file() else 0


def extract_command(folder: Path, meta: Mapping[str, Any]) -> str:
    """Return the command that computes the missing features of a store, for messages."""
    dataset, name = folder.parent.parent, folder.name
    where = f"DATASET={dataset.name}" if dataset.parent == Path("data") else f"FOLDER={shlex.quote(str(dataset))}"
    if meta.get(FROM_FILES):
        height, width = meta["preprocessing"]["size"]
        other_name = f" FEATURES={name}" if name != "files" else ""
        return f'`make extract {where} BACKBONE=files{other_name} ARGS="--model.image_size=[{height},{width}]"`'
    if meta.get("library") != "authors":
        if Path("configs/backbone", f"{name}.yaml").is_file():
            return f"`make extract {where} BACKBONE={name}`"
        return f"`make extract {where} FEATURES={name}` with the same BACKBONE= and WEIGHTS= as before"
    source_file = folder / "source.json"
    source = shlex.quote(read_json(source_file)["folder"]) if source_file.is_file() else "<the authors' folder>"
    return f"`make extract {where} FEATURES={name} FEATURES_FROM={source}`"


class FeatureStore:
    """A complete store with an array, read-only; create it with `open`.

    Attributes:
        folder: of the store. meta: content of `meta.json`.
    """

    def __init__(
        self,
        folder: Path,
        meta: dict[str, Any],
        index: dict[str, int],
        array: npt.NDArray[Any],
        sums: npt.NDArray[np.uint32],
    ) -> None:
        self.folder = folder
        self.meta = meta
        self._index = index
        self._array = array  # (images, C, H, W), memory-mapped; only used in read(), which checks the rows
        self._sums = sums
        # In shared memory, so that forked data loading workers check each row only once.
        self._verified = np.frombuffer(mmap.mmap(-1, max(1, len(array))), dtype=np.bool_)

    @classmethod
    def open(cls, folder: str | Path, trained_on: Mapping[str, Any] | None = None) -> "FeatureStore":
        """Open a complete store; one without an array is a `FileStore`.

        Args:
            folder: of the store.
            trained_on: `meta` of the store that a captioner was trained with; the features of this store must be of the same
                kind. None: no captioner.

        Raises:
            DiffcapError: there is no store, it has another version, it is incomplete or truncated, or its backbone, weights,
                preprocessing or shape are not those of `trained_on`.
        """
        folder = Path(folder)
        meta = read_meta(folder)
        expected = meta if trained_on is None else trained_on
        for key in _COMPATIBILITY_KEYS:
            if key == "weights_sha256" and expected.get(key) is None:
                continue  # an imported captioner; the hash is unknown
            if meta.get(key) != expected.get(key):
                raise DiffcapError(
                    f"{folder}: its features have {key} {_short(meta.get(key))}, the captioner was trained on "
                    f"{_short(expected.get(key))}; extract with that backbone and its weights."
                )
        paths, stamps = read_index(folder)
        if meta.get(FROM_FILES):
            from diffcap.features.files import FileStore  # which imports this module

            return FileStore(folder, meta, paths, stamps)
        done = _read_done(folder, len(paths))
        if not (folder / COMPLETE).is_file():
            raise DiffcapError(
                f"{folder}: extraction is not complete ({int(done.sum())} of {len(paths)} images done); run "
                f"{extract_command(folder, meta)}, which computes only the missing images."
            )
        shape = (len(paths), *meta["shape"])
        dtype = _DTYPES[meta["dtype"]]
        data = folder / _FILES[meta["dtype"]]
        sizes = {data: int(np.prod(shape, dtype=np.int64)) * dtype.itemsize, folder / SUMS: 4 * len(paths)}
        for path, size in sizes.items():
            if file_size(path) < size:
                raise DiffcapError(
                    f"{path}: truncated, {file_size(path)} bytes, but {len(paths)} images need {size}; run "
                    f"{extract_command(folder, meta)}, which computes only the missing images."
                )
        array = np.memmap(data, dtype=dtype, mode="r", shape=shape)
        sums = np.memmap(folder / SUMS, dtype="<u4", mode="r", shape=(len(paths),))
        index = {path: row for row, path in enumerate(paths) if done[row]}
        return cls(folder, meta, index, array, sums)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, H, W) of one image."""
        channels, height, width = self.meta["shape"]
        return channels, height, width

    @property
    def row_bytes(self) -> float:
        """Bytes that are read for one image."""
        return float(np.prod(self.shape)) * self.dtype.itemsize

    @property
    def data_files(self) -> list[Path]:
        """The files that `read` reads."""
        return [self.folder / _FILES[self.meta["dtype"]]]

    def __len__(self) -> int:
        return len(self._index)

    def rows(self, paths: Sequence[str]) -> Rows:
        """Return the row numbers of n image paths (as in the manifest), (n,) int64."""
        try:
            return np.fromiter((self._index[path] for path in paths), dtype=np.int64, count=len(paths))
        except KeyError as error:
            unknown = sum(path not in self._index for path in paths)
            raise DiffcapError(
                f"{self.folder}: {unknown} of {len(paths)} images have no features there, the first is {error.args[0]}; "
                f"run {extract_command(self.folder, self.meta)}, which computes only the missing images."
            ) from None

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the features: float16 or uint8."""
        return _DTYPES[self.meta["dtype"]]

    def read(self, rows: Rows, out: npt.NDArray[Any] | None = None) -> npt.NDArray[Any]:
        """Return a copy of rows. Each row is compared with its checksum when it is read for the first time.

        Args:
            rows: (n,) row numbers.
            out: (n, C, H, W) of `dtype`, where the copy is written; None: a new array.

        Returns:
            (n, C, H, W) float16 or uint8, in the order of `rows`.
        """
        rows = np.asarray(rows, dtype=np.int64)
        if out is None:
            out = np.empty((len(rows), *self.shape), dtype=self.dtype)
        array = self._array.view(np.ndarray)  # slices of a memmap are slower
        for index in np.argsort(rows, kind="stable").tolist():  # reading in ascending order is faster
            out[index] = array[rows[index]]
        new = np.flatnonzero(~self._verified[rows])
        if len(new):
            damaged = rows[new][_checksums(out, new) != self._sums[rows[new]]]
            if len(damaged):
                self._raise_damaged(np.unique(damaged))
            self._verified[rows[new]] = True
        return out

    def _raise_damaged(self, damaged: Rows) -> NoReturn:
        with suppress(OSError):  # the store may be read-only
            (self.folder / _VERIFIED).unlink(missing_ok=True)  # so that the next extraction checks all rows
            _mark_not_done(self.folder, damaged)
            (self.folder / COMPLETE).unlink(missing_ok=True)
        first = next(path for path, row in self._index.items() if row == damaged[0])
        raise DiffcapError(
            f"{self.folder}: the features of {first} are damaged (they do not match their checksum in {SUMS}); run "
            f"{extract_command(self.folder, self.meta)}, which checks all images and computes the damaged ones again."
        )


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, so that only one process at a time creates or extends the store."""
    with (folder / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class StoreWriter:
    """Creates or extends a store; several processes can write into the same folder at the same time.

    A row is synchronised with the disk before it is marked as done. So a process that is killed leaves only rows that are
    complete or will be computed again. Missing rows are those of new images, of images whose file has changed, and damaged
    rows. To find damaged rows, all rows are compared with their checksums, but only if the files do not match
    `verified.json`. Rows of images that are not in `paths` are kept.

    Args:
        folder: of the store; it is created.
        paths: distinct images whose features are wanted.
        shape: (C, H, W) of one image's features.
        meta: JSON values that identify the backbone, see `Backbone.describe`.
        stamps: size and time of each image file, in the order of `paths`, to detect changed images; "" for a missing file,
            which keeps its features. None: changes are not detected.

    Attributes:
        paths: image of each row, also of rows that are not wanted. folder, shape, meta: as given.
    """

    def __init__(
        self,
        folder: str | Path,
        paths: Sequence[str],
        shape: tuple[int, int, int],
        meta: Mapping[str, Any],
        stamps: Sequence[str] | None = None,
    ) -> None:
        self.folder = Path(folder)
        self.shape = shape
        self.folder.mkdir(parents=True, exist_ok=True)
        # Converted to JSON and back, so that tuples become lists, as in the file.
        self.meta = json.loads(json.dumps({"version": VERSION, "shape": shape, "dtype": "float16", **meta}))
        self._dtype, self._file = _DTYPES[self.meta["dtype"]], _FILES[self.meta["dtype"]]
        self._row_bytes = int(np.prod(shape)) * self._dtype.itemsize
        with locked(self.folder):
            self._create_or_extend(list(paths), list(stamps) if stamps is not None else [""] * len(paths))
        self._data = os.open(self.folder / self._file, os.O_RDWR)
        self._marks = os.open(self.folder / "done.u8", os.O_RDWR)
        self._sums = os.open(self.folder / SUMS, os.O_RDWR)
        self._unmarked: list[Rows] = []
        self._unsynced_bytes = 0
        self._synced_at = time.monotonic()
        self._warned = False

    def _create_or_extend(self, paths: list[str], stamps: list[str]) -> None:
        known: list[str] = []
        known_stamps: list[str] = []
        if (self.folder / "meta.json").is_file():
            check_kind(self.folder, read_meta(self.folder), self.meta)
            known, known_stamps = read_index(self.folder)
        row_of = {path: row for row, path in enumerate(known)}
        stale = []
        for path, stamp in zip(paths, stamps, strict=True):
            row = row_of.setdefault(path, len(row_of))
            if row == len(known):
                known.append(path)
                known_stamps.append(stamp)
            elif stamp and known_stamps[row] != stamp:  # a missing image keeps its features
                known_stamps[row] = stamp
                stale.append(row)
        self._wanted = np.fromiter((row_of[path] for path in paths), dtype=np.int64, count=len(paths))
        self.paths = known

        marked = _read_done(self.folder, len(known))
        done = marked.copy()
        done[stale] = False
        if not (self.folder / "meta.json").is_file():
            done[:] = False  # it is unknown which images the rows are of
        for name, size in ((self._file, self._row_bytes), (SUMS, 4)):
            done[file_size(self.folder / name) // size :] = False
        if done.any() and not self._is_verified():
            self._check_rows(done)
        if not done[self._wanted].all():
            (self.folder / COMPLETE).unlink(missing_ok=True)
        # The process may be killed at any line. So marks are removed before the files are extended and before the index
        # assigns rows to new images.
        if (marked & ~done).any():
            _mark_not_done(self.folder, np.flatnonzero(marked & ~done))
        for name, size in ((self._file, self._row_bytes), ("done.u8", 1), (SUMS, 4)):
            with (self.folder / name).open("ab") as file:
                if file.tell() < len(known) * size:
                    file.truncate(
                        len(known) * size
                    )  # extends the file sparsely; disk space is used when a row is written
        write_json(self.folder / "index.json", {"paths": known, "stamps": known_stamps})
        write_json(self.folder / "meta.json", self.meta)
        self._write_verified()

    def _state(self) -> str:
        """Sizes and modification times of the array and of the checksums, the content of `verified.json`."""
        stats = {name: (self.folder / name).stat() for name in (self._file, SUMS)}
        return json.dumps({name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()})

    def _is_verified(self) -> bool:
        path = self.folder / _VERIFIED
        return path.is_file() and path.read_bytes() == self._state().encode()

    def _write_verified(self) -> None:
        if not self._is_verified():
            write_text(self.folder / _VERIFIED, self._state())

    def _check_rows(self, done: npt.NDArray[np.bool_]) -> None:
        """Compare all done rows with their checksums, and set `done` to False for those that differ."""
        from diffcap.utils.progress import progress_bar

        rows = np.flatnonzero(done)
        print(f"{self.folder}: comparing the features of {len(rows):,} images with their checksums", flush=True)
        data = np.memmap(self.folder / self._file, np.uint8, mode="r", shape=(int(rows[-1]) + 1, self._row_bytes))
        sums = np.fromfile(self.folder / SUMS, "<u4")
        with progress_bar("checking features", len(rows)) as advance:
            for part in np.array_split(rows, 1 + len(rows) * self._row_bytes // _PROGRESS_BYTES):
                done[part] = _checksums(data, part) == sums[part]
                advance(len(part))
        damaged = rows[~done[rows]]
        if len(damaged):
            print(
                f"{self.folder}: the features of {len(damaged):,} images are damaged (first {self.paths[damaged[0]]}) and "
                "will be computed again",
                flush=True,
            )

    def missing(self) -> Rows:
        """Return the rows of wanted images that are not done, ascending, (n,) int64."""
        done = _read_done(self.folder, len(self.paths))
        return np.sort(self._wanted[~done[self._wanted]])

    def write(self, rows: Rows, features: npt.NDArray[Any]) -> None:
        """Write the features of some rows.

        Args:
            rows: (n,) row numbers.
            features: (n, C, H, W), any float type; stored as float16. Values beyond its range are clipped, with one
                warning (it happens for untrained networks). Pixels are whole numbers from 0 to 255.
        """
        rows = np.asarray(rows, dtype=np.int64)
        if features.shape != (len(rows), *self.shape):
            raise ValueError(f"expected features of shape {(len(rows), *self.shape)}, got {features.shape}")
        finite = np.isfinite(features).all(axis=(1, 2, 3))
        if not finite.all():
            first = self.paths[int(rows[~finite][0])]
            raise DiffcapError(
                f"{first}: its features are infinite or not a number; check the weights file, then run again."
            )
        low, high = (0, 255) if self._dtype.kind == "u" else (-_FLOAT16_MAX, _FLOAT16_MAX)
        clipped = np.clip(features, low, high)
        if not self._warned and not np.array_equal(clipped, features):
            warnings.warn(
                f"{self.folder}: some features are outside the range from {low:.0f} to {high:.0f} and are clipped; "
                "check that the weights are trained.",
                stacklevel=2,
            )
            self._warned = True
        values = np.ascontiguousarray(clipped, dtype=self._dtype)
        for row, value in zip(rows.tolist(), values):
            _write_at(self._data, value.tobytes(), row * self._row_bytes)
            _write_at(self._sums, zlib.crc32(value.tobytes()).to_bytes(4, "little"), 4 * row)
        self._unmarked.append(rows)
        self._unsynced_bytes += values.nbytes
        if self._unsynced_bytes >= _SYNC_BYTES or time.monotonic() - self._synced_at >= _SYNC_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Synchronise the written rows with the disk, then mark them as done."""
        os.fdatasync(self._data)
        os.fdatasync(self._sums)
        for rows in self._unmarked:
            for run in np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1):
                if len(run):
                    _write_at(self._marks, b"\1" * len(run), int(run[0]))
        self._unmarked.clear()
        self._unsynced_bytes = 0
        self._synced_at = time.monotonic()

    def finish(self) -> None:
        """Mark the store as complete. Call it once, after all processes have flushed."""
        self.flush()
        missing = self.missing()
        if len(missing):
            raise DiffcapError(
                f"{self.folder}: {len(missing)} of {len(self._wanted)} images are still missing, the first is "
                f"{self.paths[int(missing[0])]}; run the same command again."
            )
        os.fdatasync(self._marks)
        write_text(self.folder / COMPLETE, f"{len(self._wanted)} images\n")
        self._write_verified()


def _write_at(file: int, data: bytes, offset: int) -> None:
    while data:
        written = os.pwrite(file, data, offset)
        data, offset = data[written:], offset + written


def _short(value: Any) -> str:
    text = json.dumps(value, sort_keys=True)
    return text if len(text) <= 100 else text[:97] + "..."
