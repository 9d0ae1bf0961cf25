"""Datasets in their official layouts, written small for tests."""

import json
from collections.abc import Iterable
from pathlib import Path

from PIL import Image

BIRD_COLUMNS = (
    "img1ObservationURL", "img1ImgURL", "img1Species", "img1Selection",
    "img2ObservationURL", "img2ImgURL", "img2Species", "img2Selection",
    "split", "annN", "description",
)  # fmt: skip


def write_image(path: Path, shade: int = 0, size: tuple[int, int] = (24, 16)) -> None:
    """A small picture with enough in it that cutting the file in two cuts the pixels."""
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = Image.new("RGB", size)
    picture.putdata([(shade % 256, x * 37 % 256, x * x % 256) for x in range(size[0] * size[1])])
    picture.save(path)


def write_clevr_change(folder: Path, train: list[int], val: list[int], test: list[int]) -> Path:
    """CLEVR-Change with images: colour changes for even ids, `add` for odd ones; two captions a pair."""
    numbers = [*train, *val, *test]
    for number in numbers:
        write_image(folder / f"images/CLEVR_default_{number:06d}.png", number)
        write_image(folder / f"sc_images/CLEVR_semantic_{number:06d}.png", number + 1)
        write_image(folder / f"nsc_images/CLEVR_nonsemantic_{number:06d}.png", number + 2)
    changed = {f"CLEVR_default_{n:06d}.png": [f"the cube {n} turned red", f"cube {n} became red"] for n in numbers}
    unchanged = {key: ["nothing changed", "no change"] for key in changed}
    kinds = {
        "color": [f"{number:06d}.png" for number in numbers if number % 2 == 0],
        "add": [f"{number:06d}.png" for number in numbers if number % 2],
    }
    for name, value in {
        "change_captions": changed,
        "no_change_captions": unchanged,
        "splits": {"train": train, "val": val, "test": test},
        "type_mapping": kinds,
    }.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def write_lines(path: Path, rows: Iterable[object]) -> None:
    """JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def bird_row(first: str, second: str, split: str, description: str, number: int = 1) -> str:
    """One row of the Birds-to-Words TSV for two photo ids."""
    page, image = "https://www.inaturalist.org/observations/9{}", "https://www.inaturalist.org/photos/{}"
    fields = [page.format(first), image.format(first), "Turdus merula", "base"]
    fields += [page.format(second), image.format(second), "Turdus pilaris", "sameGenus"]
    return "\t".join([*fields, split, str(number), description])
