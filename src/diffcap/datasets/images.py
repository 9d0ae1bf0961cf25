"""Are the images that a dataset names all there, and whole? Looked at once, remembered while the files stay as they are."""

import io
import json
import stat
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, NamedTuple

from diffcap.errors import DiffcapError
from diffcap.records import ChangePair, read_json, write_text

MISSING = "missing"
BATCH = 5000  # images between two notes of what was found good; a killed check goes on from the last one


class Problem(NamedTuple):
    """What is wrong with the image at `path` (relative to the dataset's root): "missing", or why it cannot be read."""

    path: str
    what: str


class Look(NamedTuple):
    """One image looked at: `[size in bytes, time of change in ns]` of a file that decoded, and what is wrong with it."""

    stamp: list[int] | None
    problem: str


def image_paths(pairs: Iterable[ChangePair]) -> list[str]:
    """Every image that the pairs name, once, sorted."""
    return sorted({path for pair in pairs for path in pair.images})


def check_images(
    root: str | Path,
    paths: Sequence[str],
    check: Literal["decode", "exists"] = "decode",
    memory: str | Path | None = None,
) -> list[Problem]:
    """Look at every image, on all cores, with a progress bar on stderr.

    Args:
        root: the folder that the paths are relative to.
        paths: images, each once.
        check: "decode" reads every file to its last pixel, so a truncated one is found; "exists" only asks for the file.
        memory: JSON file that keeps the stamps of the images that decoded, so that the next run passes over those that
            have not changed since; None to look at all. Not used by "exists".

    Returns:
        The images that are missing or broken, in the order of `paths`.
    """
    from diffcap.progress import progress_bar

    root, memory = Path(root), Path(memory) if memory and check == "decode" else None
    known = _recall(memory, root) if memory else {}
    fresh: dict[str, list[int]] = {}
    problems = []
    # Threads: the decoder and the disk let go of Python's lock.
    with ThreadPoolExecutor() as pool, progress_bar("checking images", len(paths)) as advance:
        for start in range(0, len(paths), BATCH):
            batch = paths[start : start + BATCH]
            for path, look in zip(batch, pool.map(lambda path: _look(root / path, check, known.get(path)), batch)):
                if look.problem:
                    problems.append(Problem(path, look.problem))
                if look.stamp:
                    fresh[path] = look.stamp
                advance(1)
            if memory and any(known.get(path) != fresh.get(path) for path in batch):
                _remember(memory, root, {**known, **fresh})
    return problems


def image_problem(path: str | Path) -> str:
    """What is wrong with one image, decoded to its last pixel; "" for nothing."""
    return _look(Path(path), "decode", None).problem


def _look(path: Path, check: str, known: list[int] | None) -> Look:
    from PIL import Image

    from diffcap.image_io import read_image  # brings Pillow: not for --help

    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return Look(None, MISSING)
    if not stat.S_ISREG(status.st_mode):
        return Look(None, MISSING)
    stamp = [status.st_size, status.st_mtime_ns]
    if check == "exists" or stamp == known:
        return Look(stamp, "")
    try:
        data = path.read_bytes()
        read_image(data, "image")  # as whatever comes later will
        with Image.open(io.BytesIO(data)) as image:
            image.verify()  # checksums and the end of the file, which decoding alone does not ask for
    except DiffcapError as error:
        return Look(None, f"broken: {str(error).removeprefix('image: ').rstrip('.')}")
    except Exception as error:  # a decoder fed with garbage may raise anything
        return Look(None, f"broken: {' '.join(str(error).split()) or type(error).__name__}")
    return Look(stamp, "")


def _recall(memory: Path, root: Path) -> dict[str, list[int]]:
    try:
        noted = read_json(memory)
        return dict(noted["images"]) if noted["root"] == str(root.absolute()) else {}
    except (DiffcapError, KeyError, TypeError, ValueError):
        return {}  # nothing noted yet, or not by us: look again


def _remember(memory: Path, root: Path, stamps: dict[str, list[int]]) -> None:
    write_text(memory, json.dumps({"root": str(root.absolute()), "images": stamps}))
