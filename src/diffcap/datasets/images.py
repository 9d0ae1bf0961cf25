"""Check that all images of a dataset exist and can be decoded.

A cache file stores a stamp for each decoded image: size and modification time of the image file, and the range of the pixel values. An
image is decoded again only if the size or the time of its file has changed.
"""

import hashlib
import io
import json
import stat
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from diffcap.datasets.pairs import group_connected_images
from diffcap.records import RANGES, ChangePair, read_json, write_text
from diffcap.utils.console import echo
from diffcap.utils.errors import DiffcapError, one_line
from diffcap.utils.files import atomic_write

if TYPE_CHECKING:  # fitting and image_io import Pillow, which takes too long for --help
    from diffcap.utils.fitting import Fit

Ranges = dict[str, tuple[float, float]]  # path of an image of more than 8 bits -> its lowest and its highest value
BATCH_SIZE = 5000  # images; the cache is written after every batch, so that a check can be resumed after a kill


def check_images(
    root: str | Path,
    paths: Sequence[str],
    check: Literal["decode", "exists"] = "decode",
    cache_file: str | Path | None = None,
) -> tuple[dict[str, str], Ranges]:
    """Check the images `paths` in the folder `root`, on all cores.

    Args:
        check: "decode" decodes every file completely, so that truncated files are found; "exists" only looks for the files.
        cache_file: JSON file with the stamps, which "decode" reads and writes. With None, all images are decoded.

    Returns:
        Path of a bad image -> "missing" or "broken: <why the file cannot be decoded>"; the ranges of the decoded images.
    """
    from diffcap.utils.progress import progress_bar

    root, cache_file = Path(root), Path(cache_file) if cache_file and check == "decode" else None
    cached_stamps: dict[str, list[Any]] = {}  # stays empty without a usable file; then all images are decoded
    if cache_file:
        with suppress(DiffcapError, KeyError, TypeError, ValueError):
            content = read_json(cache_file)
            cached_stamps = dict(content["images"]) if content["root"] == str(root.absolute()) else {}
    stamps: dict[str, list[Any]] = {}
    problems: dict[str, str] = {}
    # Threads use all cores, because reading and decoding release the interpreter lock.
    with ThreadPoolExecutor() as pool, progress_bar("checking images", len(paths)) as advance:
        for start in range(0, len(paths), BATCH_SIZE):
            batch = paths[start : start + BATCH_SIZE]
            results = pool.map(lambda path: _check_image(root / path, check, cached_stamps.get(path)), batch)
            for path, (stamp, problem) in zip(batch, results):
                if problem:
                    problems[path] = problem
                if stamp:
                    stamps[path] = stamp
                advance(1)
            if cache_file and any(cached_stamps.get(path) != stamps.get(path) for path in batch):
                content = {"root": str(root.absolute()), "images": {**cached_stamps, **stamps}}
                write_text(cache_file, json.dumps(content))
    return problems, {path: tuple(stamp[2]) for path, stamp in stamps.items() if stamp[2]}


def with_ranges(pairs: list[ChangePair], ranges: Ranges) -> list[ChangePair]:
    """Store in each pair the ranges of values by which later stages scale its images with more than 8 bits (`ChangePair.ranges`).

    Two images are in one group if a pair, or a chain of pairs, connects them. All images of a group whose pixels are integers get one
    common range, and all images of a group whose pixels are floats get another. So an image has the same range in all its pairs.
    """
    if not ranges:
        return pairs
    group_of = group_connected_images(pairs)
    common_ranges: dict[tuple[str, type], tuple[float, float]] = {}
    for path, (low, high) in ranges.items():
        if path in group_of:  # masks have no group, and are not scaled
            range_key = group_of[path], type(low)
            lowest, highest = common_ranges.get(range_key, (low, high))
            common_ranges[range_key] = min(lowest, low), max(highest, high)
    pairs_with_ranges = []
    for pair in pairs:
        of_pair = {path: common_ranges[group_of[path], type(ranges[path][0])] for path in pair.images if path in ranges}
        pairs_with_ranges.append(replace(pair, extra={**pair.extra, RANGES: of_pair}) if of_pair else pair)
    return pairs_with_ranges


def write_fitted(pairs: Sequence[ChangePair], root: Path, folder: Path, fit: "Fit", strict: bool) -> list[ChangePair]:
    """Write both images of each pair, fitted to each other, as PNG files to `folder`. Return the pairs with these files and the key "fit".

    Files that were written from the same images before are used again.
    """
    from PIL import Image, PngImagePlugin

    from diffcap.utils.fitting import NOT_REGISTERED
    from diffcap.utils.image_io import read_pair
    from diffcap.utils.progress import progress_bar

    if key := next((key for pair in pairs for key in ("mask", "boxes") if key in pair.extra), None):
        raise DiffcapError(f'--fit {fit}: pairs have "{key}", which does not fit the new images; omit one of the two.')
    folder.mkdir(parents=True, exist_ok=True)

    def fit_images(pair: ChangePair) -> ChangePair:
        files = [root / path for path in pair.images]
        stamps = [(file.absolute(), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        digest = hashlib.sha256(repr((pair.id, fit, strict, stamps)).encode()).hexdigest()[:16]
        names = [f"{file.stem[:40]}-{digest}-{side}.png" for file, side in zip(files, ("before", "after"))]
        if not (folder / names[1]).is_file():  # it is written last, and has the record
            images = read_pair(files[0], files[1], fit=fit, strict=strict)
            record = PngImagePlugin.PngInfo()
            record.add_text("fit", json.dumps(images.fit))
            for name, side in zip(names, (images.before, images.after)):
                with atomic_write(folder / name) as temporary:
                    side.image.save(temporary, "PNG", pnginfo=record)
        with Image.open(folder / names[1]) as written:
            values = json.loads(written.info["fit"])
        return replace(pair, before=names[0], after=names[1], extra={**pair.extra, "fit": values})

    with ThreadPoolExecutor() as pool, progress_bar("fitting images", len(pairs)) as advance:
        fitted = []
        for pair in pool.map(fit_images, pairs):
            fitted.append(pair)
            advance(1)
    num_left = sum(pair.extra["fit"]["note"].startswith(NOT_REGISTERED) for pair in fitted)
    if num_left:
        counts = f"{num_left:,} of {len(fitted):,} pairs"
        echo(f'note: {counts} are {NOT_REGISTERED}; the key "fit" in the manifest says why.')
    return fitted


def image_problem(path: str | Path) -> str:
    """Return "missing", "broken: <reason>", or "" if an image can be decoded."""
    return _check_image(Path(path), "decode", None)[1]


def _check_image(image_file: Path, check: str, cached_stamp: list[Any] | None) -> tuple[list[Any] | None, str]:
    """Return the stamp of an image, and what `image_problem` returns.

    The stamp is [size in bytes, modification time in ns, range of the values]. The range is None for an image of 8 bits. The stamp is
    None if there is a problem, or if `check` is "exists".
    """
    from PIL import Image, UnidentifiedImageError

    from diffcap.utils.image_io import read_image

    try:
        file_status = image_file.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None, "missing"
    except (OSError, ValueError) as error:  # no permission, or a path that no file system accepts
        return None, f"broken: {one_line(error)}"
    if not stat.S_ISREG(file_status.st_mode):
        return None, "missing"
    if check == "exists":
        return None, ""
    stamp = [file_status.st_size, file_status.st_mtime_ns]
    if cached_stamp and len(cached_stamp) == 3 and cached_stamp[:2] == stamp:  # stamps of older versions have no range
        return cached_stamp, ""
    try:  # to decode by `read_image`, as later stages do
        file_content = image_file.read_bytes()
        value_range = read_image(file_content, "image").value_range  # None for 8 bits
        # `read_image` also reads TIFF files that Pillow cannot open; they are not verified.
        with suppress(UnidentifiedImageError), Image.open(io.BytesIO(file_content)) as image:
            image.verify()  # checks the checksums and the end of the file, which decoding does not check
    except DiffcapError as error:
        return None, f"broken: {str(error).removeprefix('image: ').rstrip('.')}"
    except Exception as error:  # a decoder may raise anything for invalid data
        return None, f"broken: {one_line(error)}"
    return [*stamp, value_range], ""
