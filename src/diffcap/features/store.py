"""The feature store: one memory-mapped array for all images of a dataset, filled by many processes at once.

A store is a folder of plain files, `data/<dataset>/features/<name>/`:

| file | what it holds |
|---|---|
| `features.f16` | the array (images, C, H, W), little-endian float16 in C order, no header; pixels: `features.u8`, uint8 |
| `index.json` | `{"paths": [...], "stamps": [...]}`: row i belongs to image `paths[i]`, a file with size and time `stamps[i]` |
| `sums.u32` | CRC-32 of each row, little-endian: checked when a row is read, and part of a training run's identity |
| `done.u8` | one byte a row: 1 once the row is on the disk. A byte, not a bit, so that two processes never share one |
| `meta.json` | format version, shape of a row, and what made the features: backbone, hash of its weights, preprocessing |
| `complete` | exists only once every row is done |
| `verified.json` | size and modification time of the first two files when all marked rows were last known to match `sums.u32` |
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

from diffcap.errors import DiffcapError
from diffcap.records import read_json, write_json, write_text

VERSION = 2
SUMS = "sums.u32"
_COMPLETE = "complete"
_VERIFIED = "verified.json"
_DTYPES: dict[str, np.dtype[Any]] = {
    "float16": np.dtype("<f2"),
    "uint8": np.dtype("u1"),
}  # by the name that meta.json has
_FILES = {"float16": "features.f16", "uint8": "features.u8"}
# What of a store's `meta.json` must agree for a captioner to read another store than its own.
_KIND = ("shape", "dtype", "library", "network", "stage", "weights_sha256", "preprocessing", "pool")
_LARGEST = float(np.finfo(np.float16).max)
# Rows that are written wait for their mark until this much or this long has passed, because forcing data to the disk after
# every batch would cost more than the batch on a fast device.
_SYNC_BYTES = 64 << 20
_SYNC_SECONDS = 0.5
_THREADS = 4  # that compute checksums: one thread checks less than a fast disk reads
_CHECKED_BYTES = 64 << 20  # between two steps of the progress bar

Rows = npt.NDArray[np.int64]


def _read_meta(folder: Path) -> dict[str, Any]:
    remedy = f"delete {folder} if it is there, and write it with {_command(folder, {})}"
    meta = read_json(folder / "meta.json", "feature store", remedy)
    version = meta.get("version") if isinstance(meta, dict) else None
    if version != VERSION:
        raise DiffcapError(
            f"{folder}: a feature store of version {version}, this program reads version {VERSION}; delete the folder "
            "and extract again."
        )
    return dict(meta)


def _read_index(folder: Path) -> tuple[list[str], list[str]]:
    index = read_json(folder / "index.json", "index of the feature store", "delete the folder and extract again")
    try:
        paths, stamps = index["paths"], index["stamps"]
    except (KeyError, TypeError):
        raise DiffcapError(
            f'{folder / "index.json"}: "paths" or "stamps" is missing; delete {folder} and extract again.'
        ) from None
    return list(paths), list(stamps)


def _read_done(folder: Path, count: int) -> npt.NDArray[np.bool_]:
    """Marks of the first `count` rows; a row past the end of the file is not done."""
    done = np.zeros(count, dtype=bool)
    path = folder / "done.u8"
    if path.is_file():
        found = np.fromfile(path, dtype=np.uint8, count=count)
        done[: len(found)] = found == 1
    return done


def _unmark(folder: Path, rows: Rows) -> None:
    """Mark rows as not done, so that extraction computes them again."""
    with (folder / "done.u8").open("r+b") as file:
        for row in rows.tolist():
            file.seek(row)
            file.write(b"\0")
        file.flush()
        os.fdatasync(file.fileno())


def _checksums(array: npt.NDArray[Any], rows: Rows) -> npt.NDArray[np.uint32]:
    """CRC-32 of some rows of a C-ordered array, (n,)."""

    def of(part: Rows) -> list[int]:
        return [zlib.crc32(array[row]) for row in part]

    # The threads end with this call: processes that are forked later (data loading) start without any.
    with ThreadPoolExecutor(_THREADS) as pool:
        parts = pool.map(of, np.array_split(rows, _THREADS))
        return np.array([checksum for part in parts for checksum in part], dtype=np.uint32)


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _command(folder: Path, meta: Mapping[str, Any]) -> str:
    """The command that computes what a store lacks."""
    dataset, name = folder.parent.parent, folder.name
    place = f"DATASET={dataset.name}" if dataset.parent == Path("data") else f"FOLDER={shlex.quote(str(dataset))}"
    if meta.get("library") != "authors":
        if Path("configs/backbone", f"{name}.yaml").is_file():
            return f"`make extract {place} BACKBONE={name}`"
        return f"`make extract {place} FEATURES={name}` with the BACKBONE= and WEIGHTS= that made it"
    note = folder / "source.json"
    source = shlex.quote(read_json(note)["folder"]) if note.is_file() else "<the authors' folder>"
    return f"`make extract {place} FEATURES={name} FEATURES_FROM={source}`"


class FeatureStore:
    """A finished store, read-only.

    Attributes:
        meta: what `meta.json` holds.
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
        self._array = array  # (images, C, H, W), memory-mapped; read() alone uses it, because it checks the rows
        self._sums = sums
        # In shared memory: what one data loading worker has checked, workers that are forked later need not check again.
        self._verified = np.frombuffer(mmap.mmap(-1, max(1, len(array))), dtype=np.bool_)

    @classmethod
    def open(cls, folder: str | Path, trained_on: Mapping[str, Any] | None = None) -> "FeatureStore":
        """Open a finished store.

        Args:
            folder: the store's. trained_on: `meta` of the store that a captioner was trained on, which is to read this
                one, whatever either is called.

        Raises:
            DiffcapError: there is none, it is of another version, unfinished, its array or its checksums are shorter than
                its index, or its features are of another backbone, other weights, another preprocessing or shape than the
                captioner's.
        """
        folder = Path(folder)
        meta = _read_meta(folder)
        wanted = meta if trained_on is None else trained_on
        for key in _KIND:
            if key == "weights_sha256" and wanted.get(key) is None:
                continue  # of an imported captioner nobody wrote it down
            if meta.get(key) != wanted.get(key):
                raise DiffcapError(
                    f"{folder}: its features have {key} {_short(meta.get(key))}, the captioner was trained on "
                    f"{_short(wanted.get(key))}; extract with that backbone and its weights."
                )
        paths, _ = _read_index(folder)
        done = _read_done(folder, len(paths))
        if not (folder / _COMPLETE).is_file():
            raise DiffcapError(
                f"{folder}: extraction is not complete ({int(done.sum())} of {len(paths)} images done); run "
                f"{_command(folder, meta)}, which computes only the missing images."
            )
        shape = (len(paths), *meta["shape"])
        dtype = _DTYPES[meta["dtype"]]
        data = folder / _FILES[meta["dtype"]]
        expected = {data: int(np.prod(shape, dtype=np.int64)) * dtype.itemsize, folder / SUMS: 4 * len(paths)}
        for path, size in expected.items():
            if _size(path) < size:
                raise DiffcapError(
                    f"{path}: truncated, {_size(path)} bytes where {len(paths)} images need {size}; run "
                    f"{_command(folder, meta)}, which computes only the lost images."
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

    def __len__(self) -> int:
        return len(self._index)

    def rows(self, paths: Sequence[str]) -> Rows:
        """Row numbers of image paths, as the manifest writes them.

        Returns:
            (n,) int64.

        Raises:
            DiffcapError: an image is not in the store (the first is named).
        """
        try:
            return np.fromiter((self._index[path] for path in paths), dtype=np.int64, count=len(paths))
        except KeyError as error:
            unknown = sum(path not in self._index for path in paths)
            raise DiffcapError(
                f"{self.folder}: {unknown} of {len(paths)} images have no features there, the first is {error.args[0]}; "
                f"run {_command(self.folder, self.meta)}, which computes only the missing images."
            ) from None

    def read(self, rows: Rows) -> npt.NDArray[Any]:
        """Copy rows into memory, and compare each with its checksum the first time that it is read.

        Returns:
            (n, C, H, W) float16 or uint8, in the order of `rows`.

        Raises:
            DiffcapError: a row does not match its checksum; the next extraction computes it again.
        """
        rows = np.asarray(rows, dtype=np.int64)
        order = np.argsort(rows, kind="stable")  # a disk likes ascending reads
        out = np.empty((len(rows), *self.shape), dtype=self._array.dtype)
        out[order] = self._array[rows[order]]
        new = np.flatnonzero(~self._verified[rows])
        if len(new):
            damaged = rows[new][_checksums(out, new) != self._sums[rows[new]]]
            if len(damaged):
                self._refuse(np.unique(damaged))
            self._verified[rows[new]] = True
        return out

    def _refuse(self, damaged: Rows) -> NoReturn:
        with suppress(OSError):  # a store that may not be written; the sentence is the same
            (self.folder / _VERIFIED).unlink(missing_ok=True)  # the next extraction checks all rows
            _unmark(self.folder, damaged)
            (self.folder / _COMPLETE).unlink(missing_ok=True)
        first = next(path for path, row in self._index.items() if row == damaged[0])
        raise DiffcapError(
            f"{self.folder}: the features of {first} are damaged (they do not match their checksum in {SUMS}); run "
            f"{_command(self.folder, self.meta)}, which checks all images and computes the damaged ones again."
        )


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, so that of several processes starting together one lays the store out."""
    with (folder / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class StoreWriter:
    """Create a store or go on with one; any number of processes may hold a writer on the same folder.

    A row is forced to the disk before it is marked done, so a process killed at any moment leaves only rows that are
    whole or will be written again. Images that the store has and `paths` has not are kept. Images that are new, or whose
    file has changed since, are missing. So are those whose row is damaged: where the files are not as `verified.json`
    says, all rows are compared with their checksums first.

    Args:
        folder: the store's folder, made if need be.
        paths: the images wanted, each once.
        shape: (C, H, W) of one image's features.
        meta: JSON values that identify what computes the features; a store made by anything else is refused.
        stamps: what changes with each image file, in the order of `paths`, "" for one out of reach, which keeps the
            features that it has; leave out to trust the paths alone.

    Raises:
        DiffcapError: the folder holds features of another backbone, weights, preprocessing or shape.
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
        # Through JSON, so that tuples compare equal to the lists that come back from the file.
        self.meta = json.loads(json.dumps({"version": VERSION, "shape": shape, "dtype": "float16", **meta}))
        self._dtype, self._file = _DTYPES[self.meta["dtype"]], _FILES[self.meta["dtype"]]
        self._row_bytes = int(np.prod(shape)) * self._dtype.itemsize
        with _locked(self.folder):
            self._lay_out(list(paths), list(stamps) if stamps is not None else [""] * len(paths))
        self._data = os.open(self.folder / self._file, os.O_RDWR)
        self._marks = os.open(self.folder / "done.u8", os.O_RDWR)
        self._sums = os.open(self.folder / SUMS, os.O_RDWR)
        self._unmarked: list[Rows] = []
        self._unsynced_bytes = 0
        self._synced_at = time.monotonic()
        self._warned = False

    def _lay_out(self, paths: list[str], stamps: list[str]) -> None:
        known: list[str] = []
        known_stamps: list[str] = []
        if (self.folder / "meta.json").is_file():
            self._refuse_other(_read_meta(self.folder))
            known, known_stamps = _read_index(self.folder)
        row_of = {path: row for row, path in enumerate(known)}
        stale = []
        for path, stamp in zip(paths, stamps, strict=True):
            row = row_of.setdefault(path, len(row_of))
            if row == len(known):
                known.append(path)
                known_stamps.append(stamp)
            elif stamp and known_stamps[row] != stamp:  # an image out of reach keeps the features it has
                known_stamps[row] = stamp
                stale.append(row)
        self._wanted = np.fromiter((row_of[path] for path in paths), dtype=np.int64, count=len(paths))
        self.paths = known

        marked = _read_done(self.folder, len(known))
        done = marked.copy()
        done[stale] = False
        if not (self.folder / "meta.json").is_file():
            done[:] = False  # nothing says which images the rows are of
        for name, size in ((self._file, self._row_bytes), (SUMS, 4)):
            done[_size(self.folder / name) // size :] = False
        if done.any() and not self._is_verified():
            self._check(done)
        if not done[self._wanted].all():
            (self.folder / _COMPLETE).unlink(missing_ok=True)
        # The order matters to a kill: marks go before files get longer, and before the index says that a new image is meant.
        if (marked & ~done).any():
            _unmark(self.folder, np.flatnonzero(marked & ~done))
        for name, size in ((self._file, self._row_bytes), ("done.u8", 1), (SUMS, 4)):
            with (self.folder / name).open("ab") as file:
                if file.tell() < len(known) * size:
                    file.truncate(len(known) * size)  # longer and sparse: no disk is used before a row is written
        write_json(self.folder / "index.json", {"paths": known, "stamps": known_stamps})
        write_json(self.folder / "meta.json", self.meta)
        self._write_verified()

    def _state(self) -> str:
        """Size and modification time of the data and of the checksums, which change whenever one of them is written."""
        found = {name: (self.folder / name).stat() for name in (self._file, SUMS)}
        return json.dumps({name: [stat.st_size, stat.st_mtime_ns] for name, stat in found.items()})

    def _is_verified(self) -> bool:
        path = self.folder / _VERIFIED
        return path.is_file() and path.read_bytes() == self._state().encode()

    def _write_verified(self) -> None:
        if not self._is_verified():
            write_text(self.folder / _VERIFIED, self._state())

    def _check(self, done: npt.NDArray[np.bool_]) -> None:
        """Compare all rows that are done with their checksums; those that differ are no longer done."""
        from diffcap.progress import progress_bar

        rows = np.flatnonzero(done)
        print(f"{self.folder}: comparing the features of {len(rows):,} images with their checksums", flush=True)
        data = np.memmap(self.folder / self._file, np.uint8, mode="r", shape=(int(rows[-1]) + 1, self._row_bytes))
        sums = np.fromfile(self.folder / SUMS, "<u4")
        with progress_bar("checking features", len(rows)) as count:
            for part in np.array_split(rows, 1 + len(rows) * self._row_bytes // _CHECKED_BYTES):
                done[part] = _checksums(data, part) == sums[part]
                count(len(part))
        damaged = rows[~done[rows]]
        if len(damaged):
            print(
                f"{self.folder}: the features of {len(damaged):,} images are damaged (first {self.paths[damaged[0]]}) and "
                "will be computed again",
                flush=True,
            )

    def _refuse_other(self, found: dict[str, Any]) -> None:
        differing = sorted(key for key in {*found, *self.meta} if found.get(key) != self.meta.get(key))
        if differing:
            key = differing[0]  # one is enough: with another network everything else differs, too
            raise DiffcapError(
                f"{self.folder}: holds features of another kind ({key} there is {_short(found.get(key))}, now "
                f"{_short(self.meta.get(key))}); give the settings that made it, delete the folder, or choose another name."
            )

    def missing(self) -> Rows:
        """Rows of the wanted images that are not done yet, ascending, (n,) int64."""
        done = _read_done(self.folder, len(self.paths))
        return np.sort(self._wanted[~done[self._wanted]])

    def write(self, rows: Rows, features: npt.NDArray[Any]) -> None:
        """Write the features of some rows.

        Args:
            rows: (n,) row numbers.
            features: (n, C, H, W), any float type; stored as float16, values beyond its range as its largest (which
                untrained networks need; a warning says so once). Pixels are whole numbers from 0 to 255.

        Raises:
            DiffcapError: a value is not a number or infinite.
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
        lowest, largest = (0, 255) if self._dtype.kind == "u" else (-_LARGEST, _LARGEST)
        clipped = np.clip(features, lowest, largest)
        if not self._warned and not np.array_equal(clipped, features):
            warnings.warn(
                f"{self.folder}: some features are beyond {_LARGEST:.0f}, float16's range, and are cut off there; the "
                "weights are hardly trained ones.",
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
        """Force what was written to the disk, then mark those rows done."""
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
        """Declare the store complete. Call it once, after every process has flushed.

        Raises:
            DiffcapError: some rows are still missing.
        """
        self.flush()
        missing = self.missing()
        if len(missing):
            raise DiffcapError(
                f"{self.folder}: {len(missing)} of {len(self._wanted)} images are still missing, the first is "
                f"{self.paths[int(missing[0])]}; run the same command again."
            )
        os.fdatasync(self._marks)
        write_text(self.folder / _COMPLETE, f"{len(self._wanted)} images\n")
        self._write_verified()


def _write_at(file: int, data: bytes, offset: int) -> None:
    while data:
        written = os.pwrite(file, data, offset)
        data, offset = data[written:], offset + written


def _short(value: Any) -> str:
    text = json.dumps(value, sort_keys=True)
    return text if len(text) <= 100 else text[:97] + "..."
