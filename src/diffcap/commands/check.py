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
from typing import TYPE_CHECKING, Any, NamedTuple
from xml.etree import ElementTree

from diffcap.commands.pairs import IMAGE_TYPES
from diffcap.records import read_json
from diffcap.utils.console import echo, print_json
from diffcap.utils.errors import DiffcapError, plain_errors, printable
from diffcap.utils.files import atomic_write

if TYPE_CHECKING:
    from diffcap.utils.pixels import Box

STATUS = {
    "same": 0,
    "changed": 1,
    "error": 2,
}  # of a pair -> exit status; that of the command is the largest one of its pairs


ImagesByName = dict[str, tuple[Path | None, Path | None]]  # name -> image before and after; None: it does not exist


class Region(NamedTuple):
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
    changed: float | None = None  # the captioner's probability of a change
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
        device: cpu, cuda, mps (Apple) or auto, which is cuda if there is one, else cpu.
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
            sys.exit(STATUS["error"])
        raise
    except Exception:  # Python's own status would be 1, which says that a pair has changed
        traceback.print_exc()
        sys.exit(STATUS["error"])
    sys.exit(max(STATUS[result.status] for result in results))


def _read_regions(path: str | None) -> list[Region]:
    """Read the file of `--ignore`."""
    if path is None:
        return []
    example = (
        'write a list of regions such as {"x": 0, "y": 0, "width": 200, "height": 80, "image": "clock.png"} in pixels'
    )
    entries = read_json(path, "list of regions", example)
    regions = []
    for number, entry in enumerate(entries if isinstance(entries, list) else [entries], 1):
        try:
            regions.append(Region(**entry))
            is_valid = all(isinstance(value, int) and value >= 0 for value in regions[-1][:4])
        except TypeError:  # no object, or an unknown or missing key
            is_valid = False
        if not is_valid or not isinstance(regions[-1].image, str):
            raise DiffcapError(f"{path}: region {number} is {json_module.dumps(entry)[:100]}; {example}.")
    return regions


def _find_pairs(before: Path, after: Path) -> ImagesByName:
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
        return Comparison(name, "changed", f"only in the folder {'after' if before is None else 'before'}")
    try:
        images = read_pair(before, after)
    except DiffcapError as error:
        return Comparison(name, "error", str(error))
    sizes = [f"{side.size[0]} x {side.size[1]}" for side in (images.before, images.after)]
    if images.before.size != images.after.size:
        return Comparison(name, "changed", f"the sizes differ: {sizes[0]} and {sizes[1]} pixels")
    first, second = (np.asarray(side.image) for side in (images.before, images.after))
    ignored = np.zeros(first.shape[:2], bool)
    for region in regions:
        if fnmatch(name, region.image):
            ignored[region.y : region.y + region.height, region.x : region.x + region.width] = True
    mask = differing_pixels(first, second, threshold, ignored)
    pixels, box = int(mask.sum()), box_of(mask)
    message = f"{pixels:,} pixel{'s differ' if pixels > 1 else ' differs'} in the box {box}" if box else ""
    status = "changed" if pixels > max_pixels else "same"
    return Comparison(name, status, message, pixels, box, seconds=time.monotonic() - start)


def _add_captions(
    results: Sequence[Comparison], pairs: ImagesByName, model_options: dict[str, Any]
) -> list[Comparison]:
    """Caption the pairs that have changed and have both images. A pair that cannot be captioned becomes an error."""
    from diffcap.change import change_probability, scored_sentences
    from diffcap.commands.model import load_model

    changed = [result for result in results if result.status == "changed" and None not in pairs[result.name]]
    captioner = load_model("blocks", {**model_options, "backbone_weights": None}) if changed else None
    images: Any = [pairs[result.name] for result in changed]
    captions = captioner.batch(images, errors="return", sentences=scored_sentences(captioner)) if captioner else []
    captioned = {}
    for result, caption in zip(changed, captions):
        if isinstance(caption, DiffcapError):
            captioned[result.name] = replace(result, status="error", message=str(caption))
        else:
            captioned[result.name] = replace(result, caption=caption.text, changed=change_probability(caption))
    return [captioned.get(result.name, result) for result in results]


def _write_junit(path: Path, results: Sequence[Comparison]) -> None:
    """Write the results in the form of JUnit: a pair that has changed is a failure."""
    suite = ElementTree.Element("testsuite", name="diffcap check", tests=str(len(results)))
    for kind, status in (("failures", "changed"), ("errors", "error")):
        suite.set(kind, str(sum(result.status == status for result in results)))
    for result in results:
        name = printable(os.fsencode(result.name).decode("utf-8", "replace"))
        case = ElementTree.SubElement(
            suite, "testcase", classname="diffcap.check", name=name, time=f"{result.seconds:.3f}"
        )
        if result.status != "same":
            text = printable("; ".join(filter(None, (result.message, result.caption))))
            ElementTree.SubElement(case, "failure" if result.status == "changed" else "error", message=text)
    with atomic_write(path) as temporary:
        ElementTree.ElementTree(suite).write(temporary, encoding="utf-8", xml_declaration=True)
