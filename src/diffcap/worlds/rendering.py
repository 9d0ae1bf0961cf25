"""Write the folder of a rendered dataset in chunks, on several processes and resumable; the bytes do not depend on their number."""

import json
import os
import random
import shutil
import struct
import sys
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from diffcap.records import SPLITS, read_json, write_json, write_text
from diffcap.utils.cores import available_cores
from diffcap.utils.errors import DiffcapError

CHUNK = 16  # scenes that are rendered together; after a kill, each worker repeats at most one chunk
PARTS = ".parts"  # folder of the chunks' metadata while a dataset is incomplete
_PER_WORKER = 160  # scenes for which the start of another process is worth its time

# From the folder, the settings and the number of the chunk's first scene: writes the images, returns the metadata of each scene.
WriteChunk = Callable[[Path, Any, int], list[dict[str, Any]]]


def claim(folder: Path, settings: Any, official: tuple[str, ...], name: str = "blocks") -> bool:
    """Check that a folder can be used, and write the settings (a dataclass) into a new one; returns whether the folder is finished.

    `official` are the files that are written last.
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


@contextmanager
def render_chunks(
    write_chunk: WriteChunk, folder: Path, settings: Any, scenes: int, workers: int | None, what: str
) -> Iterator[list[Any]]:
    """Write all missing chunks, and yield the metadata of all scenes (`what`); after the block, the folder is finished."""
    from diffcap.utils.progress import progress_bar

    parts = folder / PARTS
    parts.mkdir(exist_ok=True)
    for temporary in parts.glob("*.tmp"):
        temporary.unlink(missing_ok=True)
    chunks = {start: parts / f"{start:06d}.json" for start in range(0, scenes, CHUNK)}
    pending = [(write_chunk, folder, settings, start, part) for start, part in chunks.items() if not part.is_file()]
    if workers is None:
        workers = min(available_cores(), 1 + len(pending) * CHUNK // _PER_WORKER)
    with progress_bar(f"rendering {what}", scenes, (len(chunks) - len(pending)) * CHUNK) as advance:
        for _ in _run(pending, workers):
            advance(CHUNK)
    yield [row for part in chunks.values() for row in read_json(part)]
    shutil.rmtree(parts, ignore_errors=True)


def _run(pending: list[tuple[WriteChunk, Path, Any, int, Path]], workers: int) -> Iterator[None]:
    if workers <= 1 or len(pending) <= 1:
        _keep_freed_memory()
        torch = sys.modules.get("torch")
        threads = torch.get_num_threads() if torch else 1
        try:
            if torch:
                torch.set_num_threads(1)
            for arguments in pending:
                _write(*arguments)
                yield
        finally:
            if torch:
                torch.set_num_threads(threads)
        return
    # Spawned, not forked: torch may have started threads already, and they do not exist in a forked process.
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _start_worker)
    try:
        for future in as_completed([pool.submit(_write, *arguments) for arguments in pending]):
            yield future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _write(write_chunk: WriteChunk, folder: Path, settings: Any, start: int, part: Path) -> None:
    write_text(part, json.dumps(write_chunk(folder, settings, start)))


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
    """Let the C library keep freed memory; otherwise allocating it again takes a quarter of the time."""
    np.empty(30 * 2**20, np.uint8)  # glibc raises its threshold to the size of the largest freed block, up to 32 MB


def reopen(folder: Path, images: Iterable[str]) -> None:
    """Delete images of a finished folder, so that the next run renders these images again."""
    (folder / PARTS).mkdir(exist_ok=True)  # a folder with PARTS is not finished, see `claim`
    for path in images:
        (folder / path).unlink(missing_ok=True)


def write_image(folder: Path, path: str, image: npt.NDArray[np.uint8], noisy: bool = False) -> None:
    """Write an (H, W, 3) or (H, W) image of a chunk as PNG, atomically; `path` is relative to the dataset's folder."""
    target = folder / path
    if not target.exists():
        temporary = folder / PARTS / f"{target.name}.{os.getpid()}.tmp"
        temporary.write_bytes(encode_png(image, noisy))
        temporary.replace(target)


def encode_png(image: npt.NDArray[np.uint8], noisy: bool) -> bytes:
    """Encode an (H, W, 3) or (H, W) image as PNG with the filter "Sub", twice as fast as Pillow; `noisy`: search no repetitions."""
    height, width, *channels = image.shape
    rows = image.reshape(height, -1)
    step = channels[0] if channels else 1
    filtered = np.ones((height, 1 + rows.shape[1]), np.uint8)
    filtered[:, 1 : 1 + step] = rows[:, :step]
    np.subtract(rows[:, step:], rows[:, :-step], out=filtered[:, 1 + step :])
    compressor = zlib.compressobj(1, strategy=zlib.Z_HUFFMAN_ONLY if noisy else zlib.Z_DEFAULT_STRATEGY)
    header = struct.pack(">IIBBBBB", width, height, 8, 2 if channels else 0, 0, 0, 0)
    data = compressor.compress(filtered.data) + compressor.flush()
    file = b"\x89PNG\r\n\x1a\n"
    for kind, content in ((b"IHDR", header), (b"IDAT", data), (b"IEND", b"")):
        file += struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
    return file


def draw_splits(kinds: Mapping[Any, list[int]], key: str, nearest: Callable[[float], int]) -> dict[str, list[int]]:
    """Draw test (10 %), val (5 %) and train at random by a key, with equally many of the scenes of each kind; `nearest` rounds."""
    splits: dict[str, list[int]] = {name: [] for name in SPLITS}
    for kind, numbers in kinds.items():
        shuffled = random.Random(f"{key} {kind}").sample(numbers, len(numbers))
        test, val = (max(1, nearest(share * len(numbers))) for share in (0.10, 0.05))
        splits["test"] += shuffled[:test]
        splits["val"] += shuffled[test : test + val]
        splits["train"] += shuffled[test + val :]
    return {name: sorted(numbers) for name, numbers in splits.items()}


def write_lines(path: Path, entries: Mapping[str, Any]) -> None:
    """Write a JSON object with one entry per line."""
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in entries.items())
    write_text(path, f"{{\n{lines}\n}}\n")
