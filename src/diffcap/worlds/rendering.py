"""Write the folder of a rendered dataset in chunks, on several processes; the same call resumes an interrupted run."""

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
_SCENES_PER_WORKER = 160  # with fewer scenes, starting another process takes longer than it saves

# Arguments: folder, settings, index of the chunk's first scene. Writes the images, and returns the metadata of each scene.
WriteChunk = Callable[[Path, Any, int], list[dict[str, Any]]]


def claim_folder(folder: Path, settings: Any, last_files: tuple[str, ...], name: str = "blocks") -> bool:
    """Check that a folder can be used, and write the settings (a dataclass) into a new one; return whether the folder is finished.

    `last_files` are written after all images.
    """
    wanted = json.loads(json.dumps(asdict(settings)))
    path = folder / f"{name}.json"
    if path.is_file():
        stored = read_json(path, f"settings of a {name} folder", f"delete {folder}, and run the same command again")
        if stored != wanted:
            differing = [key for key in wanted if not isinstance(stored, dict) or stored.get(key) != wanted[key]]
            raise DiffcapError(
                f"{folder} holds {name} with other settings ({', '.join(differing)}); choose another folder or delete this one."
            )
        return all((folder / file).is_file() for file in last_files) and not (folder / PARTS).is_dir()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DiffcapError(f"{folder} holds files that are not of {name}; choose another folder or empty this one.")
    write_json(path, wanted)
    return False


@contextmanager
def render_chunks(
    write_chunk: WriteChunk, folder: Path, settings: Any, scene_count: int, workers: int | None, unit: str
) -> Iterator[list[Any]]:
    """Write all missing chunks, and yield the metadata of all scenes; `unit` names them in the progress bar."""
    from diffcap.utils.progress import progress_bar

    parts = folder / PARTS
    parts.mkdir(exist_ok=True)
    for temporary in parts.glob("*.tmp"):
        temporary.unlink(missing_ok=True)
    chunks = {start: parts / f"{start:06d}.json" for start in range(0, scene_count, CHUNK)}
    pending = [(write_chunk, folder, settings, start, part) for start, part in chunks.items() if not part.is_file()]
    if workers is None:
        workers = min(available_cores(), 1 + len(pending) * CHUNK // _SCENES_PER_WORKER)
    finished_chunks = len(chunks) - len(pending)
    with progress_bar(f"rendering {unit}", scene_count, finished_chunks * CHUNK) as advance:
        for _ in _render_pending(pending, workers):
            advance(CHUNK)
    yield [row for part in chunks.values() for row in read_json(part)]
    shutil.rmtree(parts, ignore_errors=True)


def _render_pending(pending: list[tuple[WriteChunk, Path, Any, int, Path]], workers: int) -> Iterator[None]:
    if workers <= 1 or len(pending) <= 1:
        _keep_freed_memory()
        torch = sys.modules.get("torch")
        thread_count = torch.get_num_threads() if torch else 1
        try:
            if torch:
                torch.set_num_threads(1)
            for arguments in pending:
                _write_part(*arguments)
                yield
        finally:
            if torch:
                torch.set_num_threads(thread_count)
        return
    # Spawned, not forked: torch may have started threads already, and they do not exist in a forked process.
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _start_worker)
    try:
        for future in as_completed([pool.submit(_write_part, *arguments) for arguments in pending]):
            yield future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _write_part(write_chunk: WriteChunk, folder: Path, settings: Any, start: int, part: Path) -> None:
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
    """Let the C library keep freed memory. Without this, a quarter of the time is spent on allocating memory again."""
    np.empty(30 * 2**20, np.uint8)  # glibc raises its threshold to the size of the largest freed block, up to 32 MB


def reopen(folder: Path, images: Iterable[str]) -> None:
    """Delete images of a finished folder, so that the next run renders these images again."""
    (folder / PARTS).mkdir(exist_ok=True)  # a folder with PARTS is not finished, see `claim_folder`
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
    """Encode an (H, W, 3) or (H, W) image as PNG, twice as fast as Pillow; `noisy`: do not search for repetitions."""
    height, width, *channels = image.shape
    rows = image.reshape(height, -1)
    pixel_bytes = channels[0] if channels else 1
    # PNG's filter "Sub" (type 1, the first byte of each row) stores the difference from the pixel to the left.
    filtered = np.ones((height, 1 + rows.shape[1]), np.uint8)
    filtered[:, 1 : 1 + pixel_bytes] = rows[:, :pixel_bytes]
    np.subtract(rows[:, pixel_bytes:], rows[:, :-pixel_bytes], out=filtered[:, 1 + pixel_bytes :])
    compressor = zlib.compressobj(1, strategy=zlib.Z_HUFFMAN_ONLY if noisy else zlib.Z_DEFAULT_STRATEGY)
    color_type = 2 if channels else 0  # RGB or gray
    header = struct.pack(">IIBBBBB", width, height, 8, color_type, 0, 0, 0)
    data = compressor.compress(filtered.data) + compressor.flush()
    file = b"\x89PNG\r\n\x1a\n"
    for kind, content in ((b"IHDR", header), (b"IDAT", data), (b"IEND", b"")):
        file += struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
    return file


def sample_splits(
    scenes_of_kind: Mapping[Any, list[int]], seed_text: str, round_count: Callable[[float], int]
) -> dict[str, list[int]]:
    """Sample test (10 %), val (5 %) and train from the scenes of each kind; `round_count` rounds the number of scenes."""
    splits: dict[str, list[int]] = {name: [] for name in SPLITS}
    for kind, scenes in scenes_of_kind.items():
        shuffled = random.Random(f"{seed_text} {kind}").sample(scenes, len(scenes))
        test_count = max(1, round_count(0.10 * len(scenes)))
        val_count = max(1, round_count(0.05 * len(scenes)))
        train_start = test_count + val_count
        splits["test"] += shuffled[:test_count]
        splits["val"] += shuffled[test_count:train_start]
        splits["train"] += shuffled[train_start:]
    return {name: sorted(scenes) for name, scenes in splits.items()}


def write_lines(path: Path, entries: Mapping[str, Any]) -> None:
    """Write a JSON object with one entry per line."""
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in entries.items())
    write_text(path, f"{{\n{lines}\n}}\n")
