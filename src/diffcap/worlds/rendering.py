"""Write the folder of a rendered dataset in chunks, on several processes and resumable; the bytes do not depend on their number."""

from __future__ import annotations

import json
import os
import shutil
import struct
import sys
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from diffcap.records import read_json, write_json, write_text
from diffcap.utils.cores import available_cores
from diffcap.utils.errors import DiffcapError

CHUNK = 16  # scenes that are rendered together; after a kill, each worker repeats at most one chunk
PARTS = ".parts"
_PER_WORKER = 160  # scenes for which the start of another process is worth its time

WriteChunk = Callable[[Path, Any, int], None]  # folder, settings, first scene


def claim(folder: Path, settings: Any, official: tuple[str, ...], name: str = "blocks") -> bool:
    """Check that a folder can be used, and write the settings into a new one.

    Args:
        folder: of the dataset. settings: a dataclass with everything that determines the files' content.
        official: the files that are written last. name: of the dataset; `<name>.json` has the settings.

    Returns:
        Whether the folder is finished.

    Raises:
        DiffcapError: the folder was written with other settings, or has other content.
    """
    wanted = json.loads(json.dumps(asdict(settings)))
    stamp = folder / f"{name}.json"
    if stamp.is_file():
        found = read_json(stamp, f"settings of a {name} folder", f"delete {folder}, and run the same command again")
        if found != wanted:
            differ = [key for key in wanted if not isinstance(found, dict) or found.get(key) != wanted[key]]
            raise DiffcapError(
                f"{folder} holds {name} with other settings ({', '.join(differ)}); choose another folder or delete this one."
            )
        return all((folder / file).is_file() for file in official) and not (folder / PARTS).is_dir()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DiffcapError(f"{folder} holds files that are not of {name}; choose another folder or empty this one.")
    write_json(stamp, wanted)
    return False


def render_all(
    write_chunk: WriteChunk, folder: Path, settings: Any, scenes: int, workers: int | None, what: str
) -> range:
    """Write all missing chunks with `workers` processes (None: one per core, fewer for a small dataset).

    Args:
        write_chunk: function that writes the images of one chunk, then its `part`.
        folder, settings: passed to `write_chunk`. scenes: number of all scenes. what: their name in the progress bar.

    Returns:
        The first scene of every chunk.
    """
    from diffcap.utils.progress import progress_bar

    (folder / PARTS).mkdir(parents=True, exist_ok=True)
    for temporary in (folder / PARTS).glob("*.tmp"):
        temporary.unlink(missing_ok=True)
    chunks = range(0, scenes, CHUNK)
    pending = [start for start in chunks if not part(folder, start).is_file()]
    if workers is None:
        workers = min(available_cores(), 1 + len(pending) * CHUNK // _PER_WORKER)
    with progress_bar(f"rendering {what}", scenes, (len(chunks) - len(pending)) * CHUNK) as advance:
        for _ in _write_pending(write_chunk, folder, settings, pending, workers):
            advance(CHUNK)
    return chunks


def _write_pending(
    write_chunk: WriteChunk, folder: Path, settings: Any, pending: list[int], workers: int
) -> Iterator[None]:
    if workers <= 1 or len(pending) <= 1:
        with _one_thread():
            for start in pending:
                write_chunk(folder, settings, start)
                yield
        return
    # Spawned, not forked: torch may have started threads already, and they do not exist in a forked process.
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _start_worker)
    try:
        for future in as_completed([pool.submit(write_chunk, folder, settings, start) for start in pending]):
            yield future.result()
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _one_thread() -> Iterator[None]:
    _keep_freed_memory()
    torch = sys.modules.get("torch")
    threads = torch.get_num_threads() if torch else 1
    if torch:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if torch:
            torch.set_num_threads(threads)


def _start_worker() -> None:
    # For torch: only some datasets import it in their worker, after this function.
    os.environ["OMP_NUM_THREADS"] = "1"
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    _keep_freed_memory()
    parent = parent_process()
    if parent is not None:  # if the parent is killed, the worker exits
        threading.Thread(target=lambda: (wait([parent.sentinel]), os._exit(1)), daemon=True).start()


def _keep_freed_memory() -> None:
    """Let the C library keep freed memory; otherwise allocating it again takes a quarter of the time.

    glibc raises its threshold for returning memory to the size of the largest freed block, up to 32 MB.
    """
    np.empty(30 * 2**20, np.uint8)


def reopen(folder: Path, images: Iterable[str]) -> None:
    """Delete images of a finished folder, so that the next run renders these images again."""
    (folder / PARTS).mkdir(exist_ok=True)  # a folder with PARTS is not finished, see `claim`
    for path in images:
        (folder / path).unlink(missing_ok=True)


def part(folder: Path, start: int) -> Path:
    """Return the path of the metadata of the chunk that begins with a scene; the file exists if the chunk is finished."""
    return folder / PARTS / f"{start:06d}.json"


def write_image(folder: Path, path: Path, data: bytes) -> None:
    """Write an image file of a chunk atomically."""
    if not path.exists():
        temporary = folder / PARTS / f"{path.name}.{os.getpid()}.tmp"
        temporary.write_bytes(data)
        temporary.replace(path)


def read_parts(folder: Path, chunks: range) -> list[Any]:
    """Return the metadata of all chunks, one entry per scene."""
    return [row for start in chunks for row in read_json(part(folder, start))]


def write_part(folder: Path, start: int, rows: list[Any]) -> None:
    """Write the metadata of a chunk, after its images."""
    write_text(part(folder, start), json.dumps(rows))


def clear_parts(folder: Path) -> None:
    """Mark the folder as finished."""
    shutil.rmtree(folder / PARTS, ignore_errors=True)


def encode_png(images: npt.NDArray[np.uint8], noisy: bool = False) -> list[bytes]:
    """Encode (B, H, W, C) images, C = 3 (RGB) or 1 (gray), as PNG files with the filter "Sub" and fast compression.

    This is twice as fast as Pillow, which tries five filters for each row, and the files are not larger.

    Args:
        noisy: for images whose neighbouring pixels all differ: no search for repetitions, which takes most of the time and finds none.
    """
    count, height, width, channels = images.shape
    rows = images.reshape(count, height, -1)  # (B, H, W C)
    filtered = np.ones((count, height, 1 + width * channels), np.uint8)
    filtered[..., 1 : 1 + channels] = rows[..., :channels]
    np.subtract(rows[..., channels:], rows[..., :-channels], out=filtered[..., 1 + channels :])
    header = struct.pack(">IIBBBBB", width, height, 8, {1: 0, 3: 2}[channels], 0, 0, 0)
    files = []
    for picture in filtered:
        compressor = zlib.compressobj(1, strategy=zlib.Z_HUFFMAN_ONLY if noisy else zlib.Z_DEFAULT_STRATEGY)
        data = compressor.compress(picture) + compressor.flush()
        chunks = ((b"IHDR", header), (b"IDAT", data), (b"IEND", b""))
        files.append(b"\x89PNG\r\n\x1a\n" + b"".join(_png_chunk(kind, data) for kind, data in chunks))
    return files


def _png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
