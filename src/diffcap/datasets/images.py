"""Check that all images of a dataset exist and can be decoded; the results for unchanged files are cached."""

import io
import json
import stat
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, NamedTuple

from diffcap.records import ChangePair, read_json, write_text
from diffcap.utils.errors import DiffcapError

MISSING = "missing"
BATCH = 5000  # the cache is written after every batch, so that a killed check can be resumed


class Problem(NamedTuple):
    """A missing or broken image.

    Attributes:
        path: relative to the dataset's root.
        reason: "missing", or "broken: " and why the file cannot be decoded.
    """

    path: str
    reason: str


class ImageStatus(NamedTuple):
    """The result of checking one image.

    Attributes:
        stamp: [size in bytes, modification time in ns]; None if there is a problem.
        problem: see `Problem.reason`; "" if there is none.
    """

    stamp: list[int] | None
    problem: str


def image_paths(pairs: Iterable[ChangePair]) -> list[str]:
    """Return the distinct image paths of the pairs, sorted."""
    return sorted({path for pair in pairs for path in pair.images})


def check_images(
    root: str | Path,
    paths: Sequence[str],
    check: Literal["decode", "exists"] = "decode",
    cache: str | Path | None = None,
) -> list[Problem]:
    """Check images on all cores, with a progress bar on stderr.

    Args:
        root: the folder that the paths are relative to.
        paths: distinct image paths.
        check: "decode" decodes every file completely, so that truncated files are found; "exists" only checks that the
            files exist.
        cache: JSON file with the sizes and modification times of the images that could be decoded; they are not decoded
            again if they have not changed. Created if it does not exist. None: check all images. Not used by "exists".

    Returns:
        The missing and broken images, in the order of `paths`.
    """
    from diffcap.utils.progress import progress_bar

    root, cache = Path(root), Path(cache) if cache and check == "decode" else None
    cached = _read_stamps(cache, root) if cache else {}
    stamps: dict[str, list[int]] = {}
    problems = []
    # Threads are enough: decoding and reading release the interpreter lock.
    with ThreadPoolExecutor() as pool, progress_bar("checking images", len(paths)) as advance:
        for start in range(0, len(paths), BATCH):
            batch = paths[start : start + BATCH]
            results = pool.map(lambda path: _check_image(root / path, check, cached.get(path)), batch)
            for path, result in zip(batch, results):
                if result.problem:
                    problems.append(Problem(path, result.problem))
                if result.stamp:
                    stamps[path] = result.stamp
                advance(1)
            if cache and any(cached.get(path) != stamps.get(path) for path in batch):
                _write_stamps(cache, root, {**cached, **stamps})
    return problems


def image_problem(path: str | Path) -> str:
    """Decode one image and return the problem, see `Problem.reason`; "" if there is none."""
    return _check_image(Path(path), "decode", None).problem


def _check_image(path: Path, check: str, cached: list[int] | None) -> ImageStatus:
    from PIL import Image

    from diffcap.utils.image_io import read_image  # imports Pillow, which is too slow for --help

    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return ImageStatus(None, MISSING)
    except (OSError, ValueError) as error:  # no permission, or a path that no file system accepts
        return _broken(error)
    if not stat.S_ISREG(status.st_mode):
        return ImageStatus(None, MISSING)
    stamp = [status.st_size, status.st_mtime_ns]
    if check == "exists" or stamp == cached:
        return ImageStatus(stamp, "")
    try:
        data = path.read_bytes()
        read_image(data, "image")  # the same function as in the later stages
        with Image.open(io.BytesIO(data)) as image:
            image.verify()  # decoding does not check the checksums and the end of the file
    except DiffcapError as error:
        return ImageStatus(None, f"broken: {str(error).removeprefix('image: ').rstrip('.')}")
    except Exception as error:  # a decoder may raise anything for invalid data
        return _broken(error)
    return ImageStatus(stamp, "")


def _broken(error: Exception) -> ImageStatus:
    return ImageStatus(None, f"broken: {' '.join(str(error).split()) or type(error).__name__}")


def _read_stamps(cache: Path, root: Path) -> dict[str, list[int]]:
    try:
        content = read_json(cache)
        return dict(content["images"]) if content["root"] == str(root.absolute()) else {}
    except (DiffcapError, KeyError, TypeError, ValueError):
        return {}  # the file is missing or has other content: check all images


def _write_stamps(cache: Path, root: Path, stamps: dict[str, list[int]]) -> None:
    write_text(cache, json.dumps({"root": str(root.absolute()), "images": stamps}))
