"""Write the folder of a rendered dataset with several processes. After an interruption, the same call renders what is missing.

Here, a scene has two or three images, and metadata: captions, and values for other files of the dataset. A chunk is `CHUNK` scenes.
"""

import json
import os
import random
import shutil
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from diffcap.records import SPLITS, JsonDict, read_json, write_json, write_text
from diffcap.utils.cores import available_cores, map_on_processes
from diffcap.utils.errors import DiffcapError

CHUNK = 16  # scenes; if a worker is killed, only its last chunk is lost
PARTS_FOLDER = ".parts"  # has a JSON file of metadata for each written chunk; deleted when the dataset is finished
_MIN_SCENES_PER_WORKER = 160  # for fewer scenes, starting another process takes longer than rendering

# A function (folder, settings, index of a chunk's first scene) that writes the images and returns the metadata of each scene.
WriteChunk = Callable[[Path, JsonDict, int], list[JsonDict]]


def claim_folder(folder: Path, settings: JsonDict, last_files: tuple[str, ...], dataset: str) -> bool:
    """Check that a folder can be used. If it is new, write the settings (JSON values, which determine all files) into it.

    `last_files` are names of files that are written after all images. Return True if the folder's dataset is already finished.
    """
    settings_file = folder / f"{dataset}.json"
    if settings_file.is_file():
        remedy = f"delete {folder}, and run the same command again"
        stored = read_json(settings_file, f"settings of a {dataset} folder", remedy)
        if stored != settings:
            differing = [key for key in settings if not isinstance(stored, dict) or stored.get(key) != settings[key]]
            raise DiffcapError(
                f"{folder} holds {dataset} with other settings ({', '.join(differing)}); choose another folder or delete this one."
            )
        return all((folder / file).is_file() for file in last_files) and not (folder / PARTS_FOLDER).is_dir()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DiffcapError(f"{folder} holds files that are not of {dataset}; choose another folder or empty this one.")
    write_json(settings_file, settings)
    return False


@contextmanager
def render_chunks(
    write_chunk: WriteChunk, folder: Path, settings: JsonDict, num_scenes: int, num_workers: int | None, unit: str
) -> Iterator[list[Any]]:
    """Write all missing chunks, and yield the metadata of all scenes. `unit` is what the progress bar calls scenes, such as "pairs"."""
    from diffcap.utils.progress import progress_bar

    parts_folder = folder / PARTS_FOLDER
    parts_folder.mkdir(exist_ok=True)  # temporary files of a killed run are deleted with this folder
    chunk_files = {start: parts_folder / f"{start:06d}.json" for start in range(0, num_scenes, CHUNK)}
    pending = [(write_chunk, folder, settings, *chunk) for chunk in chunk_files.items() if not chunk[1].is_file()]
    if num_workers is None:
        num_workers = min(available_cores(), 1 + len(pending) * CHUNK // _MIN_SCENES_PER_WORKER)
    with progress_bar(f"rendering {unit}", num_scenes, CHUNK * (len(chunk_files) - len(pending))) as advance:
        for _ in map_on_processes(_write_chunk_file, pending, min(num_workers, len(pending))):
            advance(CHUNK)
    yield [metadata for chunk_file in chunk_files.values() for metadata in read_json(chunk_file)]
    shutil.rmtree(parts_folder, ignore_errors=True)


def _write_chunk_file(write_chunk: WriteChunk, folder: Path, settings: JsonDict, start: int, chunk_file: Path) -> None:
    # When this array is freed, glibc begins to keep freed blocks of up to 30 MB. Otherwise, allocations take a quarter of the time.
    np.empty(30 * 2**20, np.uint8)
    write_text(chunk_file, json.dumps(write_chunk(folder, settings, start)))


def delete_images(folder: Path, images: Iterable[str]) -> None:
    """Delete images of a finished folder, and mark it as unfinished, so that the next run renders these images again."""
    (folder / PARTS_FOLDER).mkdir(exist_ok=True)
    for path in images:
        (folder / path).unlink(missing_ok=True)


def write_image(folder: Path, image_path: str, image: np.ndarray, is_noisy: bool = False) -> None:
    """Write an (H, W, 3) or (H, W) uint8 image of a chunk as PNG, atomically; `image_path` is relative to the dataset's folder."""
    image_file = folder / image_path
    if not image_file.exists():
        image_file.parent.mkdir(parents=True, exist_ok=True)
        temporary_file = folder / PARTS_FOLDER / f"{image_file.name}.{os.getpid()}.tmp"
        temporary_file.write_bytes(encode_png(image, is_noisy))
        temporary_file.replace(image_file)


def encode_png(image: np.ndarray, is_noisy: bool) -> bytes:
    """Encode an (H, W, 3) or (H, W) uint8 image as PNG, twice as fast as Pillow. Noisy images are not searched for repetitions."""
    height, width, *channels = image.shape
    rows = image.reshape(height, -1)
    pixel_bytes = channels[0] if channels else 1
    # PNG's filter "Sub" (type 1, the first byte of each row) stores the difference from the pixel to the left.
    filtered_rows = np.ones((height, 1 + rows.shape[1]), np.uint8)
    filtered_rows[:, 1 : 1 + pixel_bytes] = rows[:, :pixel_bytes]
    np.subtract(rows[:, pixel_bytes:], rows[:, :-pixel_bytes], out=filtered_rows[:, 1 + pixel_bytes :])
    compressor = zlib.compressobj(1, strategy=zlib.Z_HUFFMAN_ONLY if is_noisy else zlib.Z_DEFAULT_STRATEGY)
    color_type = 2 if channels else 0  # RGB or gray
    header = struct.pack(">IIBBBBB", width, height, 8, color_type, 0, 0, 0)
    pixel_data = compressor.compress(filtered_rows.data) + compressor.flush()
    png = b"\x89PNG\r\n\x1a\n"
    for block_type, content in ((b"IHDR", header), (b"IDAT", pixel_data), (b"IEND", b"")):
        checksum = zlib.crc32(block_type + content)
        png += struct.pack(">I", len(content)) + block_type + content + struct.pack(">I", checksum)
    return png


def sample_splits(
    scenes_of_kind: Mapping[Any, list[int]], seed_text: str, round_number: Callable[[float], int]
) -> dict[str, list[int]]:
    """Divide the scenes of each kind (such as a change type) at random: 10 % test, 5 % val, 85 % train. `round_number` rounds sizes."""
    splits: dict[str, list[int]] = {split: [] for split in SPLITS}
    for kind, scenes in scenes_of_kind.items():
        shuffled = random.Random(f"{seed_text} {kind}").sample(scenes, len(scenes))
        num_test = max(1, round_number(0.10 * len(scenes)))
        train_start = num_test + max(1, round_number(0.05 * len(scenes)))
        splits["test"] += shuffled[:num_test]
        splits["val"] += shuffled[num_test:train_start]
        splits["train"] += shuffled[train_start:]
    return {split: sorted(scenes) for split, scenes in splits.items()}


def write_entries(path: Path, entries: Mapping[str, Any]) -> None:
    """Write a JSON object with one entry per line."""
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in entries.items())
    write_text(path, f"{{\n{lines}\n}}\n")
