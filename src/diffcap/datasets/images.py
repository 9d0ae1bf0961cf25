"""Check that all images of a dataset exist and can be decoded; the results for unchanged files are cached."""

import io
import json
import stat
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from diffcap.datasets.pairs import connected_images
from diffcap.records import RANGES, ChangePair, read_json, write_text
from diffcap.utils.errors import DiffcapError

MISSING = "missing"
# Path relative to the dataset's root; "missing", or "broken: " and the reason why the file cannot be decoded.
Problem = tuple[str, str]
BATCH = 5000  # images; the cache is written after every batch, so that a killed check can be resumed


def image_paths(pairs: Iterable[ChangePair]) -> list[str]:
    """Return the distinct image paths of the pairs, sorted."""
    return sorted({path for pair in pairs for path in pair.images})


def check_images(
    root: str | Path,
    paths: Sequence[str],
    check: Literal["decode", "exists"] = "decode",
    cache: str | Path | None = None,
    ranges: dict[str, tuple[float, float]] | None = None,
) -> list[Problem]:
    """Check images on all cores, with a progress bar on stderr; returns the missing and broken ones, in the order of `paths`.

    Args:
        check: "decode" decodes every file completely, so that truncated files are found; "exists" does not.
        cache: JSON file with the sizes and modification times of the images that could be decoded; they are not decoded
            again if they have not changed. Created if it does not exist. None: check all images. Not used by "exists".
        ranges: is filled with the range of values of each image with more than 8 bits, by its path; not by "exists".
    """
    from diffcap.utils.progress import progress_bar

    root, cache = Path(root), Path(cache) if cache and check == "decode" else None
    cached = _read_stamps(cache, root) if cache else {}
    stamps: dict[str, list[Any]] = {}
    problems: list[Problem] = []
    # Threads are enough: decoding and reading release the interpreter lock.
    with ThreadPoolExecutor() as pool, progress_bar("checking images", len(paths)) as advance:
        for start in range(0, len(paths), BATCH):
            batch = paths[start : start + BATCH]
            results = pool.map(lambda path: _check_image(root / path, check, cached.get(path)), batch)
            for path, (stamp, problem) in zip(batch, results):
                if problem:
                    problems.append((path, problem))
                if stamp:
                    stamps[path] = stamp
                advance(1)
            if cache and any(cached.get(path) != stamps.get(path) for path in batch):
                content = {"root": str(root.absolute()), "images": {**cached, **stamps}}
                write_text(cache, json.dumps(content))
    if ranges is not None:
        ranges.update((path, tuple(stamp[2])) for path, stamp in stamps.items() if len(stamp) > 2 and stamp[2])
    return problems


def with_ranges(pairs: list[ChangePair], ranges: Mapping[str, tuple[float, float]]) -> list[ChangePair]:
    """Give pairs with images of more than 8 bits the range of values by which these images are scaled, see `ChangePair.ranges`.

    All images that are connected by pairs have one range, of integers and of floats; so both images of each pair do, and the features
    of an image are the same in all its pairs. `ranges`: own range of each image, see `check_images`.
    """
    if not ranges:
        return pairs
    group = connected_images(pairs)
    common: dict[tuple[str, type], tuple[float, float]] = {}
    for path, (low, high) in ranges.items():
        if path in group:  # not a mask
            key = group[path], type(low)
            lowest, highest = common.get(key, (low, high))
            common[key] = min(lowest, low), max(highest, high)
    found = [
        {path: common[group[path], type(ranges[path][0])] for path in pair.images if path in ranges} for pair in pairs
    ]
    return [replace(pair, extra={**pair.extra, RANGES: one}) if one else pair for pair, one in zip(pairs, found)]


def image_problem(path: str | Path) -> str:
    """The problem of one image, see `Problem`; "" if there is none."""
    return _check_image(Path(path), "decode", None)[1]


def _check_image(path: Path, check: str, cached: list[Any] | None) -> tuple[list[Any] | None, str]:
    """The stamp and the problem of an image, see `Problem`; "" if there is none.

    The stamp is [size in bytes, modification time in ns, range of the values if the image has more than 8 bits, else None]; None if there
    is a problem, without the range if the image was not decoded.
    """
    from PIL import Image, UnidentifiedImageError

    from diffcap.utils.image_io import read_image  # imports Pillow, which is too slow for --help

    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None, MISSING
    except (OSError, ValueError) as error:  # no permission, or a path that no file system accepts
        return None, _broken(error)
    if not stat.S_ISREG(status.st_mode):
        return None, MISSING
    stamp = [status.st_size, status.st_mtime_ns]
    if check == "exists":
        return stamp, ""
    if cached and len(cached) == 3 and cached[:2] == stamp:  # older caches have no ranges
        return cached, ""
    try:
        data = path.read_bytes()
        values = read_image(data, "image").values  # the same function as in the later stages
        with suppress(UnidentifiedImageError), Image.open(io.BytesIO(data)) as image:  # a TIFF that only rasterio reads
            image.verify()  # decoding does not check the checksums and the end of the file
    except DiffcapError as error:
        return None, f"broken: {str(error).removeprefix('image: ').rstrip('.')}"
    except Exception as error:  # a decoder may raise anything for invalid data
        return None, _broken(error)
    return [*stamp, values], ""


def _broken(error: Exception) -> str:
    return f"broken: {' '.join(str(error).split()) or type(error).__name__}"


def _read_stamps(cache: Path, root: Path) -> dict[str, list[Any]]:
    try:
        content = read_json(cache)
        return dict(content["images"]) if content["root"] == str(root.absolute()) else {}
    except (DiffcapError, KeyError, TypeError, ValueError):
        return {}  # the file is missing or has other content: check all images
