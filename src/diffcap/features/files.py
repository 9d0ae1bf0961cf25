"""Image files as a feature store: pixels are not stored, but decoded and resized each time they are read.

For methods that read pixels at sizes at which a store of all pixels would be too large. The values are those of the store of
pixels of the same size. The folder `data/<dataset>/features/<name>/` then has no array, only

| file | content |
|---|---|
| `index.json` | `{"paths": [...], "stamps": [...]}` of the dataset's image files, see `diffcap.features.store` |
| `sums.u32` | CRC-32 of each file, little-endian; checked when a file is read, and part of a training run's hash |
| `meta.json` | that of the store of pixels, with `"from_files": true` |
| `complete` | exists if all files were read |

A checksum is of the file's content: a dataset that was copied or moved, so that its files have other times, is still the same.
"""

import json
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from diffcap.features.images import load_image
from diffcap.features.preprocessing import ResizeOnly
from diffcap.features.store import (
    CHECKSUM_THREADS,
    COMPLETE,
    FROM_FILES,
    SUMS,
    VERSION,
    FeatureStore,
    Rows,
    check_kind,
    extract_command,
    file_size,
    locked,
    read_index,
    read_meta,
)
from diffcap.records import read_root, write_json, write_text
from diffcap.utils.cores import available_cores
from diffcap.utils.errors import DiffcapError
from diffcap.utils.files import atomic_write

_DECODING_THREADS = 4  # Pillow decodes and resizes without the interpreter's lock


class FileStore(FeatureStore):
    """A complete store without an array, read-only; `FeatureStore.open` creates it.

    Args:
        folder: of the store, `data/<dataset>/features/<name>`; the images are those of the `dataset.json` there.
        meta: content of `meta.json`. paths, stamps: those in `index.json`.
    """

    def __init__(self, folder: Path, meta: dict[str, Any], paths: Sequence[str], stamps: Sequence[str]) -> None:
        self.folder = folder
        self.meta = meta
        self._index = {path: row for row, path in enumerate(paths)}
        command = extract_command(folder, meta)
        if not (folder / COMPLETE).is_file():
            raise DiffcapError(f"{folder}: the image files have changed, or were not all read; run {command}.")
        if file_size(folder / SUMS) != 4 * len(paths):
            raise DiffcapError(f"{folder / SUMS}: damaged, it must have 4 bytes per image; run {command}.")
        self._sums = np.fromfile(folder / SUMS, dtype="<u4")
        self._paths = list(paths)
        parts = enumerate(stamp.split() for stamp in stamps)
        self._ranges = {row: (json.loads(part[2]), json.loads(part[3])) for row, part in parts if len(part) == 4}
        self._root = read_root(folder.parent.parent)
        height, width = meta["preprocessing"]["size"]
        self._preprocess = ResizeOnly((height, width))

    @property
    def row_bytes(self) -> float:
        """Mean size of an image file."""
        return sum(map(file_size, self.data_files)) / len(self._paths)

    @property
    def data_files(self) -> list[Path]:
        """The image files."""
        return [self._root / path for path in self._paths]

    def read(self, rows: Rows, out: npt.NDArray[Any] | None = None) -> npt.NDArray[np.uint8]:
        """Decode and resize image files.

        Args:
            rows: (n,) row numbers. out: (n, 3, H, W) uint8, where the pixels are written; None: a new array.

        Returns:
            (n, 3, H, W) uint8, in the order of `rows`.
        """
        if out is None:
            out = np.empty((len(rows), *self.shape), dtype=np.uint8)
        # The threads end with this call, because data loading workers are forked later.
        with ThreadPoolExecutor(min(_DECODING_THREADS, available_cores())) as pool:
            list(pool.map(self._read_row, rows, out))
        return out

    def _read_row(self, row: int, out: npt.NDArray[np.uint8]) -> None:
        file = self._root / self._paths[row]
        content = _content(file)
        if zlib.crc32(content) != self._sums[row]:
            with suppress(OSError):  # the store may be read-only
                (self.folder / COMPLETE).unlink(missing_ok=True)
            raise DiffcapError(
                f"{file}: the image has changed since `make extract` (its checksum is not the one in {self.folder / SUMS}); run "
                f"{extract_command(self.folder, self.meta)}, then this command again."
            )
        out[:] = self._preprocess.pixels(load_image(content, str(file), self._ranges.get(row))).numpy()


def write_file_store(
    folder: Path,
    paths: Sequence[str],
    files: Sequence[Path],
    stamps: Sequence[str],
    shape: tuple[int, int, int],
    meta: Mapping[str, Any],
) -> int:
    """Create or update a store without an array. Files that have not changed since the last time are not read again.

    The files are read, not decoded: `make data` has decoded them.

    Args:
        folder: of the store; it is created. paths: distinct images, relative to the dataset's root.
        files, stamps: file of each image, and its size and time, see `image_stamps`.
        shape: (3, H, W) of the resized images. meta: JSON values of the backbone, see `Backbone.describe`.

    Returns:
        The number of files that were read.
    """
    from diffcap.utils.progress import progress_bar

    folder.mkdir(parents=True, exist_ok=True)
    meta = json.loads(json.dumps({"version": VERSION, "shape": shape, **meta, FROM_FILES: True}))
    with locked(folder):
        known = _known_sums(folder, meta)
        keys = list(zip(paths, stamps, strict=True))
        new = [number for number, key in enumerate(keys) if key not in known]
        if list(known) == keys:
            return 0
        (folder / COMPLETE).unlink(missing_ok=True)
        sums = np.array([known.get(key, 0) for key in keys], dtype="<u4")
        problems = []
        with ThreadPoolExecutor(CHECKSUM_THREADS) as pool, progress_bar("reading image files", len(new)) as advance:
            for number, result in zip(new, pool.map(_checksum, (files[number] for number in new))):
                if isinstance(result, DiffcapError):
                    problems.append(str(result))
                else:
                    sums[number] = result
                advance(1)
        if problems:
            count = "1 image file" if len(problems) == 1 else f"{len(problems):,} image files"
            raise DiffcapError(
                f"{problems[0].removesuffix('.')} ({count} of {len(paths):,} cannot be read; `make data` lists all missing and "
                "broken images, and renders those of a rendered dataset again)."
            )
        write_json(folder / "index.json", {"paths": list(paths), "stamps": list(stamps)})
        with atomic_write(folder / SUMS) as temporary:
            sums.tofile(temporary)
        write_json(folder / "meta.json", meta)
        write_text(folder / COMPLETE, f"{len(paths)} images\n")
    return len(new)


def _known_sums(folder: Path, meta: Mapping[str, Any]) -> dict[tuple[str, str], int]:
    """(path, stamp) -> checksum of each image of a complete store in the folder; empty if there is none."""
    if not (folder / "meta.json").is_file():
        return {}
    check_kind(folder, read_meta(folder), meta)
    paths, stamps = read_index(folder)
    if not (folder / COMPLETE).is_file() or file_size(folder / SUMS) != 4 * len(paths):
        return {}
    return dict(zip(zip(paths, stamps), np.fromfile(folder / SUMS, dtype="<u4").tolist()))


def _content(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise DiffcapError(f"{file}: cannot be read ({error.strerror}); fetch the file again.") from None


def _checksum(file: Path) -> int | DiffcapError:
    try:
        return zlib.crc32(_content(file))
    except DiffcapError as error:
        return error
