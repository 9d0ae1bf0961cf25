"""`diffcap check`: compare the screenshots of two folders in continuous integration; the exit status says whether any pair differs."""

import json as json_module
import os
import sys
import time
import traceback
import unicodedata
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from diffcap.commands.pairs import IMAGE_TYPES
from diffcap.utils.console import echo, print_json
from diffcap.utils.errors import DiffcapError, plain_errors, printable
from diffcap.utils.files import atomic_write

if TYPE_CHECKING:
    from diffcap.utils.pixels import Box

SAME, CHANGED, ERROR = "same", "changed", "error"  # status of a pair
STATUS = {SAME: 0, CHANGED: 1, ERROR: 2}  # exit status of the command: the largest one of its pairs
_REGION_KEYS = ("x", "y", "width", "height")


@dataclass(frozen=True)
class Region:
    """A rectangle, in pixels, that is not compared in the images whose names match the pattern `image`."""

    x: int
    y: int
    width: int
    height: int
    image: str = "*"


@dataclass(frozen=True)
class Comparison:
    """The result for a pair of images, which have the same name in both folders."""

    name: str
    status: str
    message: str = ""
    pixels: int | None = None  # number of pixels that differ
    box: "Box | None" = None  # (left, top, right, bottom) around them
    caption: str | None = None
    seconds: float = 0.0


def check(
    before: str,
    after: str,
    ignore: str | None = None,
    colour_threshold: float = 0.1,
    max_pixels: int = 0,
    checkpoint: list[str] | None = None,
    prompt: str | None = None,
    base: str | None = None,
    device: str = "auto",
    junit: str | None = None,
    html: str | None = None,
    json: bool = False,
) -> None:
    """Compare the images of two folders, such as screenshots before and after a commit (diffcap check BEFORE AFTER).

    The exit status is 0 if all pairs are the same, 1 if a pair has changed, an image is in one folder only, or the sizes of a pair
    differ, and 2 after an error. Differences of antialiasing are ignored, as by pixelmatch. Text that has moved is a change.

    Args:
        before: Folder of images; folders in it are read, too. Or one image.
        after: Folder of images with the same names. Or one image.
        ignore: JSON file with a list of regions that are not compared: {"x": 0, "y": 0, "width": 200, "height": 80} in pixels, and
            optionally "image": a name or a pattern, such as "pages/*.png".
        colour_threshold: Smallest difference of colors that counts, from 0 (any) to 1 (black and white only). JPEG needs about 0.2.
        max_pixels: A pair is the same if at most this number of pixels differ.
        checkpoint: A captioner, as for `diffcap caption`: the pairs that have changed get a caption. By default there are no captions.
        prompt: Question to a vision-language model that was not fine-tuned.
        base: Folder of the vision-language model that a checkpoint was trained on.
        device: cpu, cuda or auto.
        junit: XML file for the results in the form of JUnit, which servers for continuous integration show.
        html: File for a page with the pairs that have changed and a box around the pixels that differ.
        json: Print a JSON object for each pair.
    """
    try:
        with plain_errors():
            regions = _read_regions(ignore)
            if not 0 <= colour_threshold <= 1:
                raise DiffcapError(f"--colour_threshold is {colour_threshold}; it must be between 0 and 1.")
            if max_pixels < 0:
                raise DiffcapError(f"--max_pixels is {max_pixels}; it must be at least 0.")
            pairs = _find_pairs(Path(before), Path(after))
            for region in regions:
                if not any(fnmatch(name, region.image) for name in pairs):
                    echo(f"note: {ignore}: no image matches {region.image}.", err=True)
            results = [_compare(name, *paths, regions, colour_threshold, max_pixels) for name, paths in pairs.items()]
            if checkpoint:
                model_options = {"checkpoint": checkpoint, "prompt": prompt, "base": base, "device": device}
                results = _add_captions(results, pairs, model_options)
            for result in results:
                if json:
                    print_json({key: value for key, value in asdict(result).items() if key != "seconds"}, None)
                else:
                    echo("\t".join(filter(None, (result.status, result.name, result.message, result.caption))))
            if junit:
                _write_junit(Path(junit), results)
            if html:
                from diffcap.report.check_page import write_page

                write_page(Path(html), results, pairs)
    except SystemExit as stop:  # `plain_errors` has made a sentence of an error
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
            sys.exit(STATUS[ERROR])
        raise
    except Exception:  # Python's own status would be 1, which says that a pair has changed
        traceback.print_exc()
        sys.exit(STATUS[ERROR])
    sys.exit(max(STATUS[result.status] for result in results))


def _read_regions(path: str | None) -> list[Region]:
    """Read the file of `--ignore`."""
    if path is None:
        return []
    try:
        entries = json_module.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise DiffcapError(f"{path}: not a JSON file ({error}); write a list of regions.") from None
    if not isinstance(entries, list):
        raise DiffcapError(f"{path}: must be a list of regions, not {type(entries).__name__}.")
    regions = []
    for number, entry in enumerate(entries, 1):
        sizes = [entry.get(key) for key in _REGION_KEYS] if isinstance(entry, dict) else []
        is_number = [isinstance(value, int) and not isinstance(value, bool) and value >= 0 for value in sizes]
        known = isinstance(entry, dict) and entry.keys() <= {*_REGION_KEYS, "image"}
        if not known or not all(is_number) or not isinstance(entry.get("image", ""), str):
            raise DiffcapError(
                f'{path}: region {number} is {printable(json_module.dumps(entry))[:100]}; write {{"x": 0, "y": 0, "width": 200, '
                '"height": 80} in whole pixels, and optionally "image": a name or pattern.'
            )
        regions.append(Region(**entry))
    return regions


def _find_pairs(before: Path, after: Path) -> dict[str, tuple[Path | None, Path | None]]:
    """Return name -> image before and after; None if the image is in one folder only. Names are paths relative to the folders."""
    for path in (before, after):
        if not path.exists():
            raise DiffcapError(f"{path}: not found; give two folders of images, or two images.")
    if before.is_dir() != after.is_dir():
        raise DiffcapError(f"{before} and {after}: one is a folder and one is not; give two folders or two images.")
    if before.is_file():
        return {after.name: (before, after)}
    sides = [_images(before), _images(after)]
    for folder, images in zip((before, after), sides):
        if not images:  # a wrong folder would look like one whose images have all been deleted
            raise DiffcapError(f"{folder}: no image in this folder; supported are {', '.join(IMAGE_TYPES)}.")
    return {name: (sides[0].get(name), sides[1].get(name)) for name in sorted({**sides[0], **sides[1]})}


def _images(folder: Path) -> dict[str, Path]:
    """Return the images in a folder and in its folders, by relative path with composed Unicode letters (NFC)."""
    return {
        unicodedata.normalize("NFC", path.relative_to(folder).as_posix()): path
        for path in folder.rglob("*")
        if path.suffix.lower().removeprefix(".") in IMAGE_TYPES and path.is_file()
    }


def _compare(
    name: str, before: Path | None, after: Path | None, regions: Sequence[Region], threshold: float, max_pixels: int
) -> Comparison:
    """Compare a pair: equal pixels first, then by `differing_pixels`."""
    import numpy as np

    from diffcap.utils.image_io import read_pair
    from diffcap.utils.pixels import box_of, differing_pixels

    start = time.monotonic()
    if before is None or after is None:
        return Comparison(name, CHANGED, f"only in the folder {'after' if before is None else 'before'}")
    try:
        images = read_pair(before, after)
    except DiffcapError as error:
        return Comparison(name, ERROR, str(error))
    sizes = [f"{side.size[0]} x {side.size[1]}" for side in (images.before, images.after)]
    if images.before.size != images.after.size:
        return Comparison(name, CHANGED, f"the sizes differ: {sizes[0]} and {sizes[1]} pixels")
    first, second = (np.asarray(side.image) for side in (images.before, images.after))
    ignored = np.zeros(first.shape[:2], bool)
    for region in regions:
        if fnmatch(name, region.image):
            ignored[region.y : region.y + region.height, region.x : region.x + region.width] = True
    mask = differing_pixels(first, second, threshold, ignored)
    pixels, box = int(mask.sum()), box_of(mask)
    message = f"{pixels:,} pixel{'s differ' if pixels > 1 else ' differs'} in the box {box}" if box else ""
    status = CHANGED if pixels > max_pixels else SAME
    return Comparison(name, status, message, pixels, box, seconds=time.monotonic() - start)


def _add_captions(
    results: Sequence[Comparison], pairs: dict[str, tuple[Path | None, Path | None]], model_options: dict[str, Any]
) -> list[Comparison]:
    """Caption the pairs that have changed and have both images. A pair that cannot be captioned becomes an error."""
    from diffcap.commands.caption import load_model

    changed = [result for result in results if result.status == CHANGED and None not in pairs[result.name]]
    if not changed:
        return list(results)
    captioner = load_model("blocks", {**model_options, "backbone_weights": None})
    captions = {}
    for result, caption in zip(changed, captioner.batch((pairs[result.name] for result in changed), errors="return")):  # type: ignore[misc]
        failed = isinstance(caption, DiffcapError)
        captions[result.name] = (
            replace(result, status=ERROR, message=str(caption)) if failed else replace(result, caption=caption.text)
        )
    return [captions.get(result.name, result) for result in results]


def _write_junit(path: Path, results: Sequence[Comparison]) -> None:
    """Write the results in the form of JUnit: a pair that has changed is a failure."""
    suite = ElementTree.Element("testsuite", name="diffcap check", tests=str(len(results)))
    for kind, status in (("failures", CHANGED), ("errors", ERROR)):
        suite.set(kind, str(sum(result.status == status for result in results)))
    for result in results:
        name = printable(os.fsencode(result.name).decode("utf-8", "replace"))
        case = ElementTree.SubElement(
            suite, "testcase", classname="diffcap.check", name=name, time=f"{result.seconds:.3f}"
        )
        if result.status != SAME:
            text = printable("; ".join(filter(None, (result.message, result.caption))))
            ElementTree.SubElement(case, "failure" if result.status == CHANGED else "error", message=text)
    with atomic_write(path) as temporary:
        ElementTree.ElementTree(suite).write(temporary, encoding="utf-8", xml_declaration=True)
