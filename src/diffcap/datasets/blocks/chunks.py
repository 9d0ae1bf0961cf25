"""How the folders of `blocks` are written: in chunks, by all cores, resumable, the same bytes on any number of them."""

from __future__ import annotations

import json
import os
import shutil
import struct
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

import torch
from torch import Tensor

from diffcap.errors import DiffcapError
from diffcap.records import read_json, write_json, write_text

CHUNK = 16  # scenes drawn together; a killed run does at most one chunk a worker again
STAMP = "blocks.json"
PARTS = ".parts"
_PER_WORKER = 160  # scenes that pay for the start of one more process

WriteChunk = Callable[[Path, Any, int], None]  # folder, settings, first scene


def claim(folder: Path, settings: Any, official: tuple[str, ...]) -> bool:
    """Whether the folder is finished; if it is new, mark it as ours, and refuse one that is another's.

    Args:
        settings: a dataclass, all that decides the folder's bytes. official: the files that are written last.
    """
    wanted = json.loads(json.dumps(asdict(settings)))
    stamp = folder / STAMP
    if stamp.is_file():
        found = read_json(stamp, "settings of a blocks folder", f"delete {folder}, and run the same command again")
        if found != wanted:
            differ = [key for key in wanted if not isinstance(found, dict) or found.get(key) != wanted[key]]
            raise DiffcapError(
                f"{folder} holds blocks of other settings ({', '.join(differ)}); choose another folder or delete this one."
            )
        return all((folder / name).is_file() for name in official) and not (folder / PARTS).is_dir()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DiffcapError(f"{folder} holds files that are not of blocks; choose another folder or empty this one.")
    write_json(stamp, wanted)
    return False


def render_all(
    write_chunk: WriteChunk, folder: Path, settings: Any, scenes: int, workers: int | None, what: str
) -> range:
    """Have every chunk written that is not there yet; gives where the chunks begin.

    Args:
        write_chunk: writes the images of one chunk, then its `part`. scenes: in all. what: they are called.
    """
    from diffcap.progress import progress_bar

    (folder / PARTS).mkdir(parents=True, exist_ok=True)
    for left in (folder / PARTS).glob("*.tmp"):
        left.unlink(missing_ok=True)
    chunks = range(0, scenes, CHUNK)
    pending = [start for start in chunks if not part(folder, start).is_file()]
    if workers is None:
        workers = min(len(os.sched_getaffinity(0)), 1 + len(pending) * CHUNK // _PER_WORKER)
    with progress_bar(f"rendering {what}", scenes, (len(chunks) - len(pending)) * CHUNK) as advance:
        for _ in _done(write_chunk, folder, settings, pending, workers):
            advance(CHUNK)
    return chunks


def _done(write_chunk: WriteChunk, folder: Path, settings: Any, pending: list[int], workers: int) -> Iterator[None]:
    if workers <= 1 or len(pending) <= 1:
        with _one_thread():
            for start in pending:
                write_chunk(folder, settings, start)
                yield
        return
    # Spawned, not forked: the parent's torch may already hold threads, which do not survive a fork.
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _start_worker)
    try:
        for future in as_completed([pool.submit(write_chunk, folder, settings, start) for start in pending]):
            yield future.result()
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    _keep_pages()
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _start_worker() -> None:
    torch.set_num_threads(1)
    _keep_pages()
    parent = parent_process()
    if parent is not None:  # a killed parent must not leave workers behind
        threading.Thread(target=lambda: (wait([parent.sentinel]), os._exit(1)), daemon=True).start()


def _keep_pages() -> None:
    """Have the C library keep the memory that tensors give back: fetching it anew costs a quarter of the time.

    The GNU one learns its thresholds from the largest block that was freed, up to 32 MB.
    """
    torch.empty(30 * 2**20, dtype=torch.uint8)


def reopen(folder: Path, images: Iterable[str]) -> None:
    """Delete images of a finished folder, so that the next run renders these images again."""
    (folder / PARTS).mkdir(exist_ok=True)  # a folder with PARTS is not finished, see `claim`
    for path in images:
        (folder / path).unlink(missing_ok=True)


def part(folder: Path, start: int) -> Path:
    """What the chunk from a scene on tells the files at the end; a chunk is finished when it stands."""
    return folder / PARTS / f"{start:06d}.json"


def write_image(folder: Path, path: Path, data: bytes) -> None:
    """An image file of a chunk, whole or not at all."""
    if not path.exists():
        temporary = folder / PARTS / f"{path.name}.{os.getpid()}.tmp"
        temporary.write_bytes(data)
        temporary.replace(path)


def read_parts(folder: Path, chunks: range) -> list[Any]:
    """What all chunks told, one entry a scene."""
    return [row for start in chunks for row in read_json(part(folder, start))]


def write_part(folder: Path, start: int, rows: list[Any]) -> None:
    """Tell of a chunk; the last thing that is done for it."""
    write_text(part(folder, start), json.dumps(rows))


def clear_parts(folder: Path) -> None:
    """Mark the folder as finished."""
    shutil.rmtree(folder / PARTS, ignore_errors=True)


def encode_png(images: Tensor) -> list[bytes]:
    """PNG files of (B, 3, H, W) uint8 images: each byte less the one to its left, lightly packed.

    Twice as fast as Pillow, which tries five filters for each row, and no larger.
    """
    rows = images.cpu().permute(0, 2, 3, 1).flatten(2)  # (B, H, 3 W)
    filtered = torch.cat([torch.ones_like(rows[..., :1]), rows[..., :3], rows[..., 3:] - rows[..., :-3]], -1)
    header = struct.pack(">IIBBBBB", images.shape[3], images.shape[2], 8, 2, 0, 0, 0)
    files = []
    for picture in filtered.numpy():
        chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(picture.tobytes(), 1)), (b"IEND", b""))
        files.append(b"\x89PNG\r\n\x1a\n" + b"".join(_png_chunk(kind, data) for kind, data in chunks))
    return files


def _png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
