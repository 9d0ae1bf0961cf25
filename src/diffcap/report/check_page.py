"""Write the page of `diffcap check`: the pairs that have changed, with a box around the pixels that differ, in one file."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import jinja2

from diffcap.report.drawing import encode_webp, fit_image
from diffcap.report.page import read_resource, security_policy
from diffcap.utils.errors import DiffcapError
from diffcap.utils.files import atomic_write
from diffcap.utils.image_io import read_image

if TYPE_CHECKING:
    from diffcap.commands.check import Comparison
    from diffcap.utils.pixels import Box

_FRAME = (900, 1200)  # an image is reduced to fit into it; its text stays readable


def write_page(
    path: Path, results: "Sequence[Comparison]", pairs: Mapping[str, tuple[Path | None, Path | None]]
) -> None:
    """Write the page. `pairs`: name -> the paths of both images, None for an image that does not exist."""
    shown = [result for result in results if result.status != "same"]
    images = {result.name: [_encode(image, result.box) for image in pairs[result.name]] for result in shown}
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(read_resource("check.html.j2"))
    with atomic_write(path) as temporary:
        page = template.render(results=shown, images=images, total=len(results), policy=security_policy(""))
        temporary.write_text(page, encoding="utf-8", errors="replace")


def _encode(path: Path | None, box: "Box | None") -> str | None:
    """Return an image with the box drawn, as WebP in base64; None if it cannot be read."""
    try:
        image = read_image(path).image if path else None
    except DiffcapError:
        return None
    if image is None:
        return None
    frame = (min(_FRAME[0], image.width), min(_FRAME[1], image.height))
    return encode_webp(fit_image(image, frame, box), quality=80)
