"""`blocks` on disk, in CLEVR-Change's official layout (see `diffcap.datasets.clevr_change`), by all cores, resumable.

Beside the official files stand `scenes.json` (below) and `blocks.json`, the settings that the folder was made with.
`scenes.json` holds under "000123.png":

    boxes                     {"before": [x0, y0, x1, y1] or null, "after": ...}: the pixels of the changed object that
                              show, x1 and y1 just past the last; null where it does not stand
    viewpoint_iou             of the change pair, 1 for the same camera (`Triples.viewpoint_iou`)
    viewpoint_iou_distractor  of the distractor pair
    changed                   {"size", "color", "material", "shape", "to"}: before the change; "to" the new color or
                              material, null for other changes
"""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
import threading
import zlib
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diffcap.datasets.blocks.captions import write_captions
from diffcap.datasets.blocks.geometry import COLORS, MATERIALS, SHAPES, SIZES
from diffcap.datasets.blocks.render import render
from diffcap.datasets.blocks.scenes import CHANGES, COLOR, MATERIAL, Triples, sample_triples
from diffcap.errors import DiffcapError
from diffcap.records import read_json, write_json, write_text

CHUNK = 16  # triples drawn together; a killed run does at most one chunk a worker again
VIEWS = (("images", "default"), ("sc_images", "semantic"), ("nsc_images", "nonsemantic"))
STAMP = "blocks.json"
LOOK = 3  # raise it when the same seed comes to give other pictures or captions
_PARTS = ".parts"
_OFFICIAL = ("change_captions.json", "no_change_captions.json", "type_mapping.json", "scenes.json", "splits.json")
_PER_WORKER = 160  # triples that pay for the start of one more process


@dataclass(frozen=True)
class Settings:
    """What decides every byte of the folder."""

    pairs: int
    seed: int
    size: tuple[int, int]
    jitter: float
    look: int = LOOK

    @property
    def triples(self) -> int:
        """A triple is a change pair and a distractor pair."""
        return self.pairs // 2


def write_blocks(
    folder: str | Path,
    pairs: int = 6000,
    seed: int = 0,
    size: tuple[int, int] = (128, 96),
    jitter: float = 1.0,
    workers: int | None = None,
) -> None:
    """Render a dataset, or finish one that was interrupted, or find it finished.

    The same settings give the same bytes, on any number of workers and after any interruption. Triple k of a seed is
    the same in a dataset of any size. Splits are by seed, 85 / 5 / 10 %, each with every change equally often.

    Args:
        folder: made if it is not there; else it must be empty or come from the same settings.
        pairs: change and distractor pairs together, half of each; even, 30 or more (one of each change in each split).
        seed: of scenes, captions and splits.
        size: width and height of the images in pixels, at least 64 x 48.
        jitter: how far camera and light stray between the images of a triple; 0 keeps them, 1 is about CLEVR-Change's.
        workers: processes; as many as there are cores by default, fewer for a small dataset.

    Raises:
        DiffcapError: a setting makes no sense, or the folder holds something else.
    """
    settings = _check(pairs, seed, size, jitter)
    folder = Path(folder)
    if _claim(folder, settings):
        return
    for name in (_PARTS, *(name for name, _ in VIEWS)):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for left in (folder / _PARTS).glob("*.tmp"):
        left.unlink(missing_ok=True)
    chunks = range(0, settings.triples, CHUNK)
    pending = [start for start in chunks if not _part(folder, start).is_file()]
    _render_all(folder, settings, pending, workers, len(chunks))
    _finish(folder, settings, chunks)


def _check(pairs: int, seed: int, size: tuple[int, int], jitter: float) -> Settings:
    if pairs < 30 or pairs % 2:
        raise DiffcapError(f"blocks: pairs must be an even number, 30 or more, not {pairs}; mend it.")
    if size[0] < 64 or size[1] < 48:
        raise DiffcapError(
            f"blocks: size must be 64 x 48 or larger, not {size[0]} x {size[1]}: smaller objects cannot be seen."
        )
    if not 0 <= jitter <= 3:
        raise DiffcapError(f"blocks: jitter must lie in 0 to 3, not {jitter:g}; mend it.")
    return Settings(pairs, seed, (size[0], size[1]), float(jitter))


def _claim(folder: Path, settings: Settings) -> bool:
    """Whether the folder is finished; if it is new, mark it as ours, and refuse one that is another's."""
    wanted = json.loads(json.dumps(asdict(settings)))
    stamp = folder / STAMP
    if stamp.is_file():
        found = read_json(stamp, "settings of a blocks folder")
        if found != wanted:
            differ = [key for key in wanted if not isinstance(found, dict) or found.get(key) != wanted[key]]
            raise DiffcapError(
                f"{folder} holds blocks of other settings ({', '.join(differ)}); choose another folder or delete this one."
            )
        if all((folder / name).is_file() for name in _OFFICIAL):
            shutil.rmtree(folder / _PARTS, ignore_errors=True)
            return True
        return False
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DiffcapError(f"{folder} holds files that are not of blocks; choose another folder or empty this one.")
    write_json(stamp, wanted)
    return False


def _render_all(folder: Path, settings: Settings, pending: list[int], workers: int | None, total: int) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    if workers is None:
        workers = min(len(os.sched_getaffinity(0)), 1 + len(pending) * CHUNK // _PER_WORKER)
    console = Console(stderr=True)
    columns = TextColumn("rendering triples"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=settings.triples, completed=max(0, (total - len(pending)) * CHUNK))
        for _ in _done(folder, settings, pending, workers):
            progress.advance(task, CHUNK)


def _done(folder: Path, settings: Settings, pending: list[int], workers: int) -> Iterator[None]:
    if workers <= 1 or len(pending) <= 1:
        with _one_thread():
            for start in pending:
                _write_chunk(folder, settings, start)
                yield
        return
    # Spawned, not forked: the parent's torch may already hold threads, which do not survive a fork.
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _start_worker)
    try:
        for future in as_completed([pool.submit(_write_chunk, folder, settings, start) for start in pending]):
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


def _part(folder: Path, start: int) -> Path:
    return folder / _PARTS / f"{start:06d}.json"


def _write_chunk(folder: Path, settings: Settings, start: int) -> None:
    """Images of one chunk, then what the JSON files will say of it: a chunk is finished when that file stands."""
    triples = sample_triples(range(start, start + CHUNK), settings.seed, settings.jitter)  # whole, also the last one
    images, index = render(triples.scenes(), settings.size)
    count = min(CHUNK, settings.triples - start)
    data = encode_png(images)
    for view, (where, name) in enumerate(VIEWS):
        for row in range(count):
            path = folder / where / f"CLEVR_{name}_{start + row:06d}.png"
            if not path.exists():
                temporary = folder / _PARTS / f"{path.name}.{os.getpid()}.tmp"
                temporary.write_bytes(data[view * CHUNK + row])
                temporary.replace(path)
    described = _describe(triples, index, settings.seed)[:count]
    write_text(_part(folder, start), json.dumps(described))


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


def _describe(triples: Triples, index: Tensor, seed: int) -> list[dict[str, Any]]:
    """For each triple its change, captions of both pairs, and its entry of `scenes.json`."""
    said, unsaid = write_captions(triples, seed)
    mask = index.view(3, len(triples), *index.shape[1:])[:2] == triples.changed[:, None, None]
    across, down = mask.any(2).int(), mask.any(3).int()  # (2, T, W), (2, T, H)
    first = [axis.argmax(-1) for axis in (across, down)]
    past_last = [axis.shape[-1] - axis.flip(-1).argmax(-1) for axis in (across, down)]
    boxes, there = torch.stack(first + past_last, -1).tolist(), mask.flatten(2).any(2).tolist()
    change_iou, distractor_iou = (iou.tolist() for iou in triples.viewpoint_iou())
    described = []
    for row, change in enumerate(triples.change.tolist()):
        scenes = triples.after if CHANGES[change] == "add" else triples.before
        place = row, int(triples.changed[row])
        to = {COLOR: COLORS, MATERIAL: MATERIALS}.get(change)
        scene = {
            "boxes": {name: boxes[k][row] if there[k][row] else None for k, name in enumerate(("before", "after"))},
            "viewpoint_iou": round(change_iou[row], 4),
            "viewpoint_iou_distractor": round(distractor_iou[row], 4),
            "changed": {
                "size": SIZES[scenes.size[place]],
                "color": COLORS[scenes.color[place]],
                "material": MATERIALS[scenes.material[place]],
                "shape": SHAPES[scenes.shape[place]],
                "to": to[int(triples.new_value[row])] if to else None,
            },
        }
        described.append({"change": CHANGES[change], "captions": said[row], "no_change": unsaid[row], "scene": scene})
    return described


def _finish(folder: Path, settings: Settings, chunks: range) -> None:
    rows = [row for start in chunks for row in read_json(_part(folder, start))]
    keys = [f"{number:06d}.png" for number in range(len(rows))]
    of_type = {kind: [number for number, row in enumerate(rows) if row["change"] == kind] for kind in CHANGES}
    for name, said in (("change_captions.json", "captions"), ("no_change_captions.json", "no_change")):
        write_json(folder / name, {f"CLEVR_default_{key}": row[said] for key, row in zip(keys, rows)})
    write_json(folder / "type_mapping.json", {kind: [keys[number] for number in of_type[kind]] for kind in CHANGES})
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(row['scene'])}" for key, row in zip(keys, rows))
    write_text(folder / "scenes.json", f"{{\n{lines}\n}}\n")
    write_json(folder / "splits.json", _split(of_type, settings.seed))
    shutil.rmtree(folder / _PARTS)


def _split(of_type: dict[str, list[int]], seed: int) -> dict[str, list[int]]:
    splits: dict[str, list[int]] = {"train": [], "val": [], "test": []}
    for kind, numbers in of_type.items():
        shuffled = random.Random(f"blocks splits {seed} {kind}").sample(numbers, len(numbers))
        test, val = (max(1, round(share * len(numbers))) for share in (0.10, 0.05))
        splits["test"] += shuffled[:test]
        splits["val"] += shuffled[test : test + val]
        splits["train"] += shuffled[test + val :]
    return {split: sorted(numbers) for split, numbers in splits.items()}
