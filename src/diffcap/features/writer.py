"""Create and extend feature stores, see `diffcap.features.store`."""

import fcntl
import json
import os
import time
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from diffcap.features.store import (
    ARRAYS,
    CHECKSUM_THREADS,
    COMPLETE,
    DONE,
    FROM_FILES,
    SUMS,
    VERIFIED,
    VERSION,
    Array,
    Rows,
    check_kind,
    checksums,
    file_size,
    mark,
    read_content,
    read_done,
    read_index,
    read_meta,
)
from diffcap.records import update_text, write_json, write_text
from diffcap.utils.errors import DiffcapError
from diffcap.utils.files import atomic_write

_FLOAT16_MAX = float(np.finfo(np.float16).max)
# Rows are synchronised with the disk after this many bytes or seconds, and only then marked as done. With a fast device,
# synchronising after every batch would take longer than computing the batch.
_SYNC_BYTES = 64 << 20
_SYNC_SECONDS = 0.5


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, so that only one process at a time creates or extends the store."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class StoreWriter:
    """Creates or extends a store with an array; several processes can write into the same folder at the same time.

    A row is synchronised with the disk before it is marked as done, so a process can be killed at any time. Missing rows are
    those of new images, of images whose file has changed, and damaged rows. To find damaged rows, all rows are compared with
    their checksums, but only if the files do not match `verified.json`. Rows of images that are not in `paths` are kept.

    Args:
        paths: distinct images whose features are wanted.
        shape: (C, H, W) of one image's features.
        meta: JSON values that identify the backbone, see `Backbone.describe`.
        stamps: size and time of each image file, in the order of `paths`, to detect changed images; "" for a missing file,
            which keeps its features. None: changes are not detected.
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
        # As it is read back from a JSON file: tuples are lists.
        self.meta = json.loads(json.dumps({"version": VERSION, "shape": shape, "dtype": "float16", **meta}))
        self._file, self._dtype = ARRAYS[self.meta["dtype"]]
        self._row_bytes = int(np.prod(shape)) * self._dtype.itemsize
        with _locked(self.folder):
            is_new = not (self.folder / "meta.json").is_file()
            stale = self._assign_rows(paths, [""] * len(paths) if stamps is None else stamps, is_new)
            self._mark_lost_rows(stale, is_new)
            # After the marks: if the process is killed here, no row is marked whose image is not in the index.
            for name, size in ((self._file, self._row_bytes), (DONE, 1), (SUMS, 4)):
                with (self.folder / name).open("ab") as file:  # sparse; disk space is used when a row is written
                    if file.tell() < len(self.paths) * size:
                        file.truncate(len(self.paths) * size)
            write_json(self.folder / "index.json", {"paths": self.paths, "stamps": self._stamps})
            write_json(self.folder / "meta.json", self.meta)
            update_text(self.folder / VERIFIED, self._state())
        self._data, self._sums = (os.open(self.folder / name, os.O_RDWR) for name in (self._file, SUMS))
        self._unmarked: list[int] = []
        self._synced_at = time.monotonic()

    def _assign_rows(self, paths: Sequence[str], stamps: Sequence[str], is_new: bool) -> list[int]:
        """Give each new image a row after those of the store; returns the rows of images whose file has changed."""
        self.paths: list[str] = []  # image of each row, also of rows that are not wanted
        self._stamps: list[str] = []
        if not is_new:
            check_kind(self.folder, read_meta(self.folder), self.meta)
            self.paths, self._stamps = read_index(self.folder)
        row_of = {path: row for row, path in enumerate(self.paths)}
        stale = []
        for path, stamp in zip(paths, stamps, strict=True):
            row = row_of.setdefault(path, len(row_of))
            if row == len(self.paths):
                self.paths.append(path)
                self._stamps.append(stamp)
            elif stamp and stamp != self._stamps[row]:  # a missing image keeps its features
                self._stamps[row] = stamp
                stale.append(row)
        self._wanted = np.fromiter((row_of[path] for path in paths), dtype=np.int64, count=len(paths))
        return stale

    def _mark_lost_rows(self, stale: list[int], is_new: bool) -> None:
        """Mark rows as missing that are stale, damaged, or beyond the end of a file."""
        marked = read_done(self.folder, len(self.paths))
        done = marked.copy()
        done[stale] = False
        if is_new:
            done[:] = False  # without meta.json, it is unknown which images the rows are of
        for name, size in ((self._file, self._row_bytes), (SUMS, 4)):
            done[file_size(self.folder / name) // size :] = False
        verified = self.folder / VERIFIED
        if done.any() and not (verified.is_file() and verified.read_bytes() == self._state().encode()):
            self._check_rows(done)
        if not done[self._wanted].all():
            (self.folder / COMPLETE).unlink(missing_ok=True)
        lost = np.flatnonzero(marked & ~done)
        if len(lost):
            mark(self.folder, lost, done=False)

    def _state(self) -> str:
        stats = {name: (self.folder / name).stat() for name in (self._file, SUMS)}
        return json.dumps({name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()})

    def _check_rows(self, done: Array) -> None:
        """Compare all done rows with their checksums, and set `done` (n,) to False for those that differ."""
        from diffcap.utils.progress import progress_bar

        rows = np.flatnonzero(done)
        print(f"{self.folder}: comparing the features of {len(rows):,} images with their checksums", flush=True)
        data = np.memmap(self.folder / self._file, np.uint8, mode="r", shape=(int(rows[-1]) + 1, self._row_bytes))
        sums = np.fromfile(self.folder / SUMS, "<u4")
        with progress_bar("checking features", len(rows)) as advance:
            for part in np.array_split(rows, 1 + len(rows) * self._row_bytes // _SYNC_BYTES):
                done[part] = checksums(data, part) == sums[part]
                advance(len(part))
        damaged = rows[~done[rows]]
        if len(damaged):
            print(
                f"{self.folder}: the features of {len(damaged):,} images are damaged (first {self.paths[damaged[0]]}) and "
                "will be computed again",
                flush=True,
            )

    def missing(self) -> Rows:
        """Rows of wanted images that are not done, ascending, (n,) int64."""
        done = read_done(self.folder, len(self.paths))
        return np.sort(self._wanted[~done[self._wanted]])

    def write(self, rows: Rows, features: Array) -> None:
        """Write the features (n, C, H, W) of some rows (n,); pixels are whole numbers from 0 to 255.

        Values outside the range of the stored type are clipped with a warning (untrained networks); NaN and infinity are errors.
        """
        finite = np.isfinite(features).all(axis=(1, 2, 3))
        if not finite.all():
            first = self.paths[int(rows[finite.argmin()])]
            raise DiffcapError(f"{first}: its features are infinite or not a number; check the weights file.")
        low, high = (0, 255) if self._dtype.kind == "u" else (-_FLOAT16_MAX, _FLOAT16_MAX)
        clipped = np.clip(features, low, high)
        if not np.array_equal(clipped, features):
            warnings.warn(
                f"{self.folder}: some features are outside the range from {low:.0f} to {high:.0f} and are clipped; "
                "check that the weights are trained.",
                stacklevel=2,
            )
        # With pwrite, not into a memory map: on a full disk, a memory map ends the process with a bus error.
        for row, value in zip(rows.tolist(), np.ascontiguousarray(clipped, dtype=self._dtype), strict=True):
            _write_at(self._data, value.tobytes(), row * self._row_bytes)
            _write_at(self._sums, zlib.crc32(value).to_bytes(4, "little"), row * 4)
            self._unmarked.append(row)
        is_much = len(self._unmarked) * self._row_bytes >= _SYNC_BYTES
        if is_much or time.monotonic() - self._synced_at >= _SYNC_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Synchronise the written rows with the disk, then mark them as done."""
        os.fdatasync(self._data)
        os.fdatasync(self._sums)
        mark(self.folder, np.array(self._unmarked, dtype=np.int64), done=True)
        self._unmarked.clear()
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
        write_text(self.folder / COMPLETE, f"{len(self._wanted)} images\n")
        update_text(self.folder / VERIFIED, self._state())


def _write_at(file: int, data: bytes, offset: int) -> None:
    while data:
        written = os.pwrite(file, data, offset)
        data = data[written:]
        offset = offset + written


def write_file_store(
    folder: Path,
    paths: Sequence[str],
    files: Sequence[Path],
    stamps: Sequence[str],
    shape: tuple[int, int, int],
    meta: Mapping[str, Any],
) -> int:
    """Create or update a store without an array; returns the number of files that were read. Unchanged files are not read again.

    The files are read, not decoded: `make data` has decoded them.

    Args:
        paths, files, stamps: of the distinct images, see `image_stamps`. shape: (3, H, W) of the resized images.
        meta: JSON values of the backbone, see `Backbone.describe`.
    """
    meta = json.loads(json.dumps({"version": VERSION, "shape": shape, **meta, FROM_FILES: True}))
    with _locked(folder):
        known: dict[tuple[str, str], int] = {}  # checksum of each image and stamp of the complete store in the folder
        if (folder / "meta.json").is_file():
            check_kind(folder, read_meta(folder), meta)
            old_paths, old_stamps = read_index(folder)
            if (folder / COMPLETE).is_file() and file_size(folder / SUMS) == 4 * len(old_paths):
                known = dict(zip(zip(old_paths, old_stamps), np.fromfile(folder / SUMS, dtype="<u4").tolist()))
        keys = list(zip(paths, stamps, strict=True))
        if list(known) == keys:
            return 0
        (folder / COMPLETE).unlink(missing_ok=True)
        new = {key: file for key, file in zip(keys, files, strict=True) if key not in known}
        known |= dict(zip(new, _checksums_of_files(list(new.values()), len(keys))))
        write_json(folder / "index.json", {"paths": list(paths), "stamps": list(stamps)})
        with atomic_write(folder / SUMS) as temporary:
            np.array([known[key] for key in keys], dtype="<u4").tofile(temporary)
        write_json(folder / "meta.json", meta)
        write_text(folder / COMPLETE, f"{len(paths)} images\n")
    return len(new)


def _checksums_of_files(files: Sequence[Path], num_images: int) -> list[int]:
    """CRC-32 of each file; `num_images` of the store are for the message."""
    from diffcap.utils.progress import progress_bar

    def checksum_or_problem(file: Path) -> int | str:
        try:
            return zlib.crc32(read_content(file))
        except DiffcapError as error:
            return str(error).removesuffix(".")
        finally:
            advance(1)

    with ThreadPoolExecutor(CHECKSUM_THREADS) as pool, progress_bar("reading image files", len(files)) as advance:
        results = list(pool.map(checksum_or_problem, files))
    if problems := [result for result in results if isinstance(result, str)]:
        count = "1 image file" if len(problems) == 1 else f"{len(problems):,} image files"
        raise DiffcapError(
            f"{problems[0]} ({count} of {num_images:,} cannot be read; `make data` lists all missing and broken images, and "
            "renders those of a rendered dataset again)."
        )
    return [result for result in results if isinstance(result, int)]
