"""Create and extend feature stores. `diffcap.features.store` describes their files."""

import fcntl
import json
import os
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from diffcap.features import store
from diffcap.records import update_text, write_json, write_text
from diffcap.utils.errors import DiffcapError
from diffcap.utils.files import atomic_write

_FLOAT16_MAX = float(np.finfo(np.float16).max)
# Rows are synchronised with the disk after this many bytes or seconds, and only then marked as done. They are not synchronised after every
# batch, because on a fast device this takes longer than computing a batch.
_SYNC_BYTES = 64 << 20
_SYNC_SECONDS = 0.5


@contextmanager
def _lock_folder(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, so that only one process at a time creates or extends the store."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class StoreWriter:
    """Creates a feature store that has an array file, or adds features to it. Several processes can write into its folder at once.

    A row is synchronised with the disk before it is marked as done, so a process can be killed at any time. The missing rows are rows
    of new images, rows of images whose file has changed, and damaged rows. To find damaged rows, all rows are compared with their
    checksums, unless the sizes and times of the array and the checksum file are still those in `verified.json`.

    Args:
        image_paths: distinct paths of the images whose features are wanted, as in `manifest.jsonl`. Rows of other images are kept.
        shape: (C, H, W) of one image's features.
        meta: JSON values that identify the backbone, see `Backbone.describe`.
        stamps: size and time of each image file, in the order of `image_paths`, to detect changed files. A missing file has the stamp
            "", and its image keeps its features. With None, changes are not detected.
        own_rows: if several jobs fill the store together, a function that returns which of the rows (n,) this job writes. Only these
            rows are compared with their checksums, so `verified.json` is not written.
    """

    def __init__(
        self,
        folder: str | Path,
        image_paths: Sequence[str],
        shape: tuple[int, int, int],
        meta: Mapping[str, Any],
        stamps: Sequence[str] | None = None,
        own_rows: Callable[[store.RowNumbers], store.RowNumbers] | None = None,
    ) -> None:
        self._is_shared = own_rows is not None
        self._own_rows = own_rows or (lambda rows: rows)
        self.folder = Path(folder)
        self.shape = shape
        # Converted to JSON and back, `self.meta` has lists instead of tuples, like `meta.json`. For pixels, `meta` has "dtype": "uint8".
        content = {"version": store.FORMAT_VERSION, "shape": shape, "dtype": "float16", **meta}
        self.meta = json.loads(json.dumps(content))
        self._array_file, self._dtype = store.ARRAY_FILES[self.meta["dtype"]]
        self._row_bytes = int(np.prod(shape)) * self._dtype.itemsize
        with _lock_folder(self.folder):
            is_new = not (self.folder / "meta.json").is_file()
            stale_rows = self._assign_rows(image_paths, [""] * len(image_paths) if stamps is None else stamps, is_new)
            self._unmark_lost_rows(stale_rows, is_new)
            # The index is written after the unmarking: if the process is killed between the two, no row of a changed image is done.
            row_sizes = {self._array_file: self._row_bytes, store.DONE_FILE: 1, store.CHECKSUM_FILE: 4}
            for name, row_size in row_sizes.items():
                with (self.folder / name).open("ab") as file:  # sparse: a row uses disk space only after it is written
                    if file.tell() < len(self.image_paths) * row_size:
                        file.truncate(len(self.image_paths) * row_size)
            write_json(self.folder / "index.json", {"paths": self.image_paths, "stamps": self._stamps})
            write_json(self.folder / "meta.json", self.meta)
            if not self._is_shared:
                update_text(self.folder / store.VERIFIED_FILE, self._sizes_and_times())  # written only if changed
        self._array_fd = os.open(self.folder / self._array_file, os.O_RDWR)
        self._checksum_fd = os.open(self.folder / store.CHECKSUM_FILE, os.O_RDWR)
        self._unmarked_rows: list[int] = []  # rows that are written, but not yet marked as done
        self._synced_at = time.monotonic()

    def _assign_rows(self, image_paths: Sequence[str], stamps: Sequence[str], is_new: bool) -> list[int]:
        """Give each new image a row after the store's rows; returns the rows of images whose file has changed."""
        self.image_paths: list[str] = []  # path of each row's image, also for rows that are not wanted
        self._stamps: list[str] = []
        if not is_new:
            store.check_same_meta(self.folder, store.read_meta(self.folder), self.meta)
            self.image_paths, self._stamps = store.read_index(self.folder)
        row_of = {path: row for row, path in enumerate(self.image_paths)}
        stale_rows = []
        for path, stamp in zip(image_paths, stamps):
            row = row_of.setdefault(path, len(row_of))
            if row == len(self.image_paths):
                self.image_paths.append(path)
                self._stamps.append(stamp)
            elif stamp and stamp != self._stamps[row]:  # "": the image file is missing
                self._stamps[row] = stamp
                stale_rows.append(row)
        self._wanted_rows = np.fromiter((row_of[path] for path in image_paths), np.int64, len(image_paths))
        return stale_rows

    def _unmark_lost_rows(self, stale_rows: list[int], is_new: bool) -> None:
        """Mark rows as not done: `stale_rows` (changed images), damaged rows, and rows beyond the end of the array or checksum file."""
        was_done = store.read_done_rows(self.folder, len(self.image_paths))
        is_done = was_done.copy()
        is_done[stale_rows] = False
        if is_new:
            is_done[:] = False  # without meta.json, the images of these rows are unknown
        for name, row_size in ((self._array_file, self._row_bytes), (store.CHECKSUM_FILE, 4)):
            is_done[store.file_size(self.folder / name) // row_size :] = False
        verified_file = self.folder / store.VERIFIED_FILE
        verified_state = verified_file.read_text(encoding="utf-8") if verified_file.is_file() else ""
        rows = self._own_rows(np.flatnonzero(is_done))
        if len(rows) and verified_state != self._sizes_and_times():
            from diffcap.utils.progress import progress_bar

            print(f"{self.folder}: comparing the features of {len(rows):,} images with their checksums", flush=True)
            array = np.memmap(self.folder / self._array_file, np.uint8, "r", shape=(int(rows[-1]) + 1, self._row_bytes))
            checksums = np.fromfile(self.folder / store.CHECKSUM_FILE, "<u4")
            with progress_bar("checking features", len(rows)) as advance:
                for part in np.array_split(rows, 1 + len(rows) * self._row_bytes // _SYNC_BYTES):
                    is_done[part] = store.compute_checksums(array, part) == checksums[part]
                    advance(len(part))
            damaged_rows = rows[~is_done[rows]]
            if len(damaged_rows):
                print(
                    f"{self.folder}: the features of {len(damaged_rows):,} images are damaged (first "
                    f"{self.image_paths[damaged_rows[0]]}) and will be computed again",
                    flush=True,
                )
        if not is_done[self._wanted_rows].all():
            (self.folder / store.COMPLETE_FILE).unlink(missing_ok=True)
        lost_rows = np.flatnonzero(was_done & ~is_done)
        if len(lost_rows):
            store.mark_rows(self.folder, lost_rows, done=False)

    def _sizes_and_times(self) -> str:
        stats = {name: (self.folder / name).stat() for name in (self._array_file, store.CHECKSUM_FILE)}
        return json.dumps({name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()})

    def missing_rows(self) -> store.RowNumbers:
        """Return the rows of wanted images that are not done, in ascending order, (n,) int64."""
        is_done = store.read_done_rows(self.folder, len(self.image_paths))
        return np.sort(self._wanted_rows[~is_done[self._wanted_rows]])

    def write(self, rows: store.RowNumbers, features: store.Array) -> None:
        """Write the features (n, C, H, W) of some rows (n,). In a store of pixels (uint8), features are whole numbers from 0 to 255.

        Values too large for the array's type, as of untrained networks, are clipped with a warning. NaN and infinity raise an error.
        """
        is_finite = np.isfinite(features).all(axis=(1, 2, 3))
        if not is_finite.all():
            first_path = self.image_paths[int(rows[is_finite.argmin()])]
            raise DiffcapError(f"{first_path}: its features are infinite or not a number; check the weights file.")
        low, high = (0, 255) if self._dtype.kind == "u" else (-_FLOAT16_MAX, _FLOAT16_MAX)
        clipped = np.clip(features, low, high)
        if not np.array_equal(clipped, features):
            warnings.warn(
                f"{self.folder}: some features are outside the range from {low:.0f} to {high:.0f} and are clipped; "
                "check that the weights are trained.",
                stacklevel=2,
            )
        # No memory map is used: if the disk is full, writing into a memory map ends the process with a bus error.
        for row, content in zip(rows.tolist(), np.ascontiguousarray(clipped, dtype=self._dtype)):
            _write_at(self._array_fd, content.tobytes(), row * self._row_bytes)
            _write_at(self._checksum_fd, zlib.crc32(content).to_bytes(4, "little"), row * 4)
            self._unmarked_rows.append(row)
        unsynced_bytes = len(self._unmarked_rows) * self._row_bytes
        if unsynced_bytes >= _SYNC_BYTES or time.monotonic() - self._synced_at >= _SYNC_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Synchronise the written rows with the disk, then mark them as done."""
        os.fdatasync(self._array_fd)
        os.fdatasync(self._checksum_fd)
        store.mark_rows(self.folder, np.array(self._unmarked_rows, dtype=np.int64), done=True)
        self._unmarked_rows.clear()
        self._synced_at = time.monotonic()

    def finish(self) -> int:
        """Mark the store as complete if no row is missing. Return the number of rows that other jobs must still write.

        In each job, one process calls this method, after all processes of the job have called `flush`.
        """
        self.flush()
        with _lock_folder(self.folder):
            missing_rows = self.missing_rows()
            own_rows = self._own_rows(missing_rows)
            if len(own_rows):
                raise DiffcapError(
                    f"{self.folder}: {len(own_rows)} of {len(self._wanted_rows)} images are still missing, the first is "
                    f"{self.image_paths[int(own_rows[0])]}; run the same command again."
                )
            if not len(missing_rows):
                write_text(self.folder / store.COMPLETE_FILE, f"{len(self._wanted_rows)} images\n")
                if not self._is_shared:
                    update_text(self.folder / store.VERIFIED_FILE, self._sizes_and_times())
        return len(missing_rows)


def _write_at(file_descriptor: int, data: bytes, offset: int) -> None:
    while data:
        num_written = os.pwrite(file_descriptor, data, offset)
        data = data[num_written:]
        offset += num_written


def write_file_store(
    folder: Path,
    image_paths: Sequence[str],
    image_files: Sequence[Path],
    stamps: Sequence[str],
    shape: tuple[int, int, int],
    meta: Mapping[str, Any],
) -> int:
    """Create or update a store without an array: training decodes the image files itself. Returns the number of checksums computed.

    Checksums of unchanged files are kept. The files are not decoded, because `make data` has checked that they can be decoded.

    Args:
        image_paths, image_files, stamps: one for each distinct image; paths as in `manifest.jsonl`, stamps from `file_stamps`.
        shape: (3, H, W) of the resized images.
        meta: JSON values of the backbone, see `Backbone.describe`.
    """
    meta = json.loads(json.dumps({"version": store.FORMAT_VERSION, "shape": shape, **meta, store.FROM_FILES_KEY: True}))
    with _lock_folder(folder):
        checksums: dict[tuple[str, str], int] = {}  # (path, stamp) -> checksum, for the images of a complete store
        if (folder / "meta.json").is_file():
            store.check_same_meta(folder, store.read_meta(folder), meta)
            old_paths, old_stamps = store.read_index(folder)
            has_all_checksums = store.file_size(folder / store.CHECKSUM_FILE) == 4 * len(old_paths)
            if has_all_checksums and (folder / store.COMPLETE_FILE).is_file():
                old_checksums = np.fromfile(folder / store.CHECKSUM_FILE, dtype="<u4").tolist()
                checksums = dict(zip(zip(old_paths, old_stamps), old_checksums))
        keys = list(zip(image_paths, stamps))
        if list(checksums) == keys:
            return 0
        (folder / store.COMPLETE_FILE).unlink(missing_ok=True)
        new_files = {key: file for key, file in zip(keys, image_files) if key not in checksums}
        checksums |= dict(zip(new_files, _compute_file_checksums(list(new_files.values()), len(keys))))
        write_json(folder / "index.json", {"paths": list(image_paths), "stamps": list(stamps)})
        with atomic_write(folder / store.CHECKSUM_FILE) as temporary_file:
            np.array([checksums[key] for key in keys], dtype="<u4").tofile(temporary_file)
        write_json(folder / "meta.json", meta)
        write_text(folder / store.COMPLETE_FILE, f"{len(image_paths)} images\n")
    return len(new_files)


def _compute_file_checksums(files: Sequence[Path], num_images: int) -> list[int]:
    """Return the CRC-32 of each file. `num_images`, the number of images in the store, is for the error message."""
    from diffcap.utils.progress import progress_bar

    def checksum_or_problem(file: Path) -> int | str:
        try:
            return zlib.crc32(store.read_content(file))
        except DiffcapError as error:
            return str(error).removesuffix(".")
        finally:
            advance(1)

    with ThreadPoolExecutor(store.CHECKSUM_THREADS) as pool, progress_bar("reading image files", len(files)) as advance:
        results = list(pool.map(checksum_or_problem, files))
    if problems := [result for result in results if isinstance(result, str)]:
        count = "1 image file" if len(problems) == 1 else f"{len(problems):,} image files"
        raise DiffcapError(
            f"{problems[0]} ({count} of {num_images:,} cannot be read; `make data` lists all missing and broken images, and "
            "renders them again if diffcap renders this dataset)."
        )
    return [result for result in results if isinstance(result, int)]
