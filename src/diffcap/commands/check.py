"""`diffcap check`: compare the screenshots of two folders in continuous integration; the exit status says whether any pair differs."""

import operator
import sys
import traceback
import unicodedata
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

from diffcap.commands.pairs import IMAGE_TYPES
from diffcap.records import JsonDict, read_json, write_text
from diffcap.utils.console import echo, print_json
from diffcap.utils.errors import DiffcapError, plain_errors, printable, wrap_errors

# Status of a pair -> exit status. That of the command is the largest one of its pairs.
STATUS = {"same": 0, "changed": 1, "error": 2}
_FRAME = (900, 1200)  # the page's images are reduced to fit into it; their text stays readable


class Region(NamedTuple):
    """A rectangle, in pixels, that is not compared in the images whose names match the pattern `image`."""

    x: int
    y: int
    width: int
    height: int
    image: str = "*"


@dataclass
class Comparison:
    """The result for a pair of images, which have the same name in both folders."""

    name: str
    images: tuple[Path | None, Path | None]  # before and after; None: it does not exist
    status: str = "changed"
    message: str = ""
    pixels: int | None = None  # number of pixels that differ
    box: tuple[int, int, int, int] | None = None  # (left, top, right, bottom) around them
    caption: str | None = None
    changed: float | None = None  # the captioner's probability of a change


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
            regions = _read_regions(ignore) if ignore else []
            if not 0 <= colour_threshold <= 1:
                raise DiffcapError(f"--colour_threshold is {colour_threshold}; it must be between 0 and 1.")
            if max_pixels < 0:
                raise DiffcapError(f"--max_pixels is {max_pixels}; it must be at least 0.")
            results = _find_pairs(Path(before), Path(after))
            for region in regions:
                if not any(fnmatch(result.name, region.image) for result in results):
                    echo(f"note: {ignore}: no image matches {region.image}.", err=True)
            for result in results:
                _compare(result, regions, colour_threshold, max_pixels)
            if checkpoint:
                model_options = {"checkpoint": checkpoint, "prompt": prompt, "base": base, "device": device}
                _add_captions(results, {**model_options, "backbone_weights": None})
            for result in results:
                if json:
                    print_json({key: value for key, value in asdict(result).items() if key != "images"}, None)
                else:
                    echo("\t".join(filter(None, (result.status, result.name, result.message, result.caption))))
            for path, make_text in ((junit, _junit_text), (html, _page_text)):
                if path:
                    write_text(path, make_text(results).encode(errors="replace").decode())
    except SystemExit as stop:  # `plain_errors` has made a sentence of an error
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
            sys.exit(STATUS["error"])
        raise
    except Exception:  # Python's own status would be 1, which says that a pair has changed
        traceback.print_exc()
        sys.exit(STATUS["error"])
    sys.exit(max(STATUS[result.status] for result in results))


def _read_regions(path: str) -> list[Region]:
    """Read the file of `--ignore`."""
    example = (
        'write a list of regions such as {"x": 0, "y": 0, "width": 200, "height": 80, "image": "clock.png"} in pixels'
    )
    regions = []
    for number, entry in enumerate(read_json(path, "list of regions", example), 1):
        with wrap_errors(f"{path}: region {number}", "not a region", example):
            region = Region(**entry)
            if min(map(operator.index, region[:4])) < 0:
                raise ValueError("a number is negative")
            fnmatch("", region.image)
        regions.append(region)
    return regions


def _find_pairs(before: Path, after: Path) -> list[Comparison]:
    """Return the pairs to compare. Their names are paths relative to the folders."""
    if before.is_file() and after.is_file():
        return [Comparison(after.name, (before, after))]
    sides = _images(before), _images(after)
    names = sorted({**sides[0], **sides[1]})
    return [Comparison(name, (sides[0].get(name), sides[1].get(name))) for name in names]


def _images(folder: Path) -> dict[str, Path]:
    """Return the images in a folder and in its folders, by relative path with composed Unicode letters (NFC)."""
    images = {
        unicodedata.normalize("NFC", path.relative_to(folder).as_posix()): path
        for path in folder.rglob("*")
        if path.suffix.lower().removeprefix(".") in IMAGE_TYPES and path.is_file()
    }
    if not images:  # a wrong folder would look like one whose images have all been deleted
        types = ", ".join(IMAGE_TYPES)
        raise DiffcapError(f"{folder}: not a folder with images ({types}); give two such folders, or two images.")
    return images


def _compare(result: Comparison, regions: Sequence[Region], threshold: float, max_pixels: int) -> None:
    """Compare the images of a pair, and set its status."""
    import numpy as np
    from PIL import Image

    from diffcap.utils.image_io import read_pair
    from diffcap.utils.pixels import differing_pixels

    before, after = result.images
    if before is None or after is None:
        result.message = f"only in the folder {'after' if before is None else 'before'}"
        return
    try:
        images = read_pair(before, after, shrink=False)
    except DiffcapError as error:
        result.status, result.message = "error", str(error)
        return
    sizes = [f"{side.size[0]} x {side.size[1]}" for side in (images.before, images.after)]
    if sizes[0] != sizes[1]:
        result.message = f"the sizes differ: {sizes[0]} and {sizes[1]} pixels"
        return
    first, second = (np.asarray(side.image) for side in (images.before, images.after))
    ignored = np.zeros(first.shape[:2], bool)
    echo(*(f"note: {note}." for note in images.notes), err=True)
    for region in regions:
        if fnmatch(result.name, region.image):
            ignored[region.y : region.y + region.height, region.x : region.x + region.width] = True
    mask = differing_pixels(first, second, threshold, ignored)
    result.pixels, result.box = int(mask.sum()), Image.fromarray(mask).getbbox()
    result.status = "changed" if result.pixels > max_pixels else "same"
    if result.box:
        unit = "pixels differ" if result.pixels > 1 else "pixel differs"
        result.message = f"{result.pixels:,} {unit} in the box {result.box}"


def _add_captions(results: Sequence[Comparison], model_options: JsonDict) -> None:
    """Caption the pairs that have changed and have both images. A pair that cannot be captioned becomes an error."""
    from diffcap.change import change_probability, scored_sentences
    from diffcap.commands.model import load_model

    changed = [result for result in results if result.status == "changed" and None not in result.images]
    if not changed:
        return
    captioner = load_model("blocks", model_options)
    images: Any = [result.images for result in changed]
    captions = captioner.batch(images, errors="return", sentences=scored_sentences(captioner))
    for result, caption in zip(changed, captions):
        if isinstance(caption, DiffcapError):
            result.status, result.message = "error", str(caption)
        else:
            result.caption, result.changed = caption.text, change_probability(caption)


def _junit_text(results: Sequence[Comparison]) -> str:
    """Return the results in the form of JUnit: a pair that has changed is a failure."""
    suite = ElementTree.Element("testsuite", name="diffcap check", tests=str(len(results)))
    kinds = {"changed": "failure", "error": "error"}
    for status, kind in kinds.items():
        suite.set(f"{kind}s", str(sum(result.status == status for result in results)))
    for result in results:
        case = ElementTree.SubElement(suite, "testcase", classname="diffcap.check", name=printable(result.name))
        if result.status in kinds:
            text = printable("; ".join(filter(None, (result.message, result.caption))))
            ElementTree.SubElement(case, kinds[result.status], message=text)
    return ElementTree.tostring(suite, "unicode")


def _page_text(results: Sequence[Comparison]) -> str:
    """Return the page: the pairs that have changed, with a box around the pixels that differ."""
    import jinja2

    from diffcap.report.page import read_resource, security_policy

    shown = [result for result in results if result.status != "same"]
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(read_resource("check.html.j2"))
    return template.render(results=shown, encode=_encode, total=len(results), policy=security_policy(""))


def _encode(path: Path | None, box: Sequence[float] | None) -> str | None:
    """Return an image with the box drawn, as WebP in base64; None if it does not exist or cannot be read."""
    from diffcap.report.drawing import encode_webp, fit_image
    from diffcap.utils.image_io import read_image

    with suppress(DiffcapError):
        if path:
            image = read_image(path, shrink=False).image
            frame = min(_FRAME[0], image.width), min(_FRAME[1], image.height)
            return encode_webp(fit_image(image, frame, box), quality=80)
    return None
