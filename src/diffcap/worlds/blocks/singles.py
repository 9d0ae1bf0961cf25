"""Single images of `blocks` in the official layouts of CUB and NABirds, the additional datasets of IDC-PCL's pre-training.

* `write_cub`: scenes with ten descriptions each, as CUB (`diffcap.datasets.cub`).
* `write_nabirds`: images of one object of one of 96 species, as NABirds (`diffcap.datasets.nabirds`). The classes are fine-grained:
  the four species of a family have the same color and shape, and differ in size or material only. Images of one species
  differ in position, rotation, camera and light.

Their scenes do not occur in `blocks` itself, for any seed.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from diffcap.records import write_text
from diffcap.utils.errors import DiffcapError
from diffcap.worlds.blocks.captions import describe
from diffcap.worlds.blocks.geometry import COLORS, HALF_VIEW, MATERIALS, PICTURE, SHAPES, SIZES, Scenes, view_boxes
from diffcap.worlds.blocks.render import render
from diffcap.worlds.blocks.scenes import sample_triples
from diffcap.worlds.blocks.write import check_render_settings
from diffcap.worlds.rendering import CHUNK, claim, clear_parts, read_parts, render_all, write_image, write_part

SENTENCES = 10  # as in CUB's captions
MIN_VISIBLE = 12  # visible pixels of an object that a sentence may name, in an image of `PICTURE`
HELD_OUT = len(COLORS) - 1  # class of the validation images in CUB's layout
SPECIES = len(COLORS) * len(SHAPES) * len(SIZES) * len(MATERIALS)
FAMILIES = len(COLORS) * len(SHAPES)
_CUB, _NABIRDS = 1 << 41, 1 << 42  # first numbers of the triples; those of `blocks` begin at 0
_ATTEMPT_STEP = 1 << 36  # difference between the numbers of two attempts at one image
_ATTEMPTS = 64
_RENDERER_VERSION = 1  # version of the images and sentences: increase it if a code change alters them for the same seed
_CUB_FILES = tuple(
    f"CUB_200_2011/{name}.txt" for name in ("image_class_labels", "train_test_split", "classes", "images")
)
_NABIRDS_FILES = tuple(
    f"{name}.txt" for name in ("image_class_labels", "train_test_split", "classes", "hierarchy", "sizes", "images")
)


@dataclass(frozen=True)
class Settings:
    """The settings that determine the content of all files; stored in `blocks.json`."""

    form: str
    images: int
    seed: int
    size: tuple[int, int]
    jitter: float
    look: int = _RENDERER_VERSION  # "look" is the key in the settings file of a dataset


def write_cub(
    folder: str | Path,
    images: int = 4000,
    seed: int = 0,
    size: tuple[int, int] = (128, 96),
    jitter: float = 1.0,
    workers: int | None = None,
) -> None:
    """Render captioned single images in CUB's layout, or the missing part of a folder that was interrupted.

    The class of an image (its folder) is the color of one of its objects. Images of the last class are held out.

    Args:
        folder: it is created; an existing one must be empty or have the same settings.
        images: number of images, at least 64. seed: of scenes and sentences. size, jitter, workers: see `write_blocks`.

    Raises:
        DiffcapError: a setting is invalid, or the folder has other content.
    """
    settings = _check("cub", images, 64, seed, size, jitter)
    folder = Path(folder)
    if claim(folder, settings, _CUB_FILES):
        return
    for number in range(len(COLORS)):
        for where in ("CUB_200_2011/images", "cvpr2016_cub/text_c10"):
            (folder / where / _color_class(number)).mkdir(parents=True, exist_ok=True)
    rows = read_parts(folder, render_all(_cub_chunk, folder, settings, images, workers, "captioned pictures"))
    for number, row in enumerate(rows):
        text = folder / "cvpr2016_cub/text_c10" / _color_class(row["class"]) / f"{_cub_name(row['class'], number)}.txt"
        write_text(text, "\n".join(row["sentences"]) + "\n")
    names = [_color_class(number) for number in range(len(COLORS))]
    write_text(folder / "cvpr2016_cub/testclasses.txt", f"{names[HELD_OUT]}\n")
    held_out = [int(row["class"] != HELD_OUT) for row in rows]
    lists = {
        "image_class_labels": [f"{number} {row['class'] + 1}" for number, row in enumerate(rows, 1)],
        "train_test_split": [f"{number} {train}" for number, train in enumerate(held_out, 1)],
        "classes": [f"{number} {name}" for number, name in enumerate(names, 1)],
        "images": [f"{n + 1} {names[row['class']]}/{_cub_name(row['class'], n)}.jpg" for n, row in enumerate(rows)],
    }
    for name, lines in lists.items():
        write_text(folder / f"CUB_200_2011/{name}.txt", "\n".join(lines) + "\n")
    clear_parts(folder)


def write_nabirds(
    folder: str | Path,
    images: int = 3840,
    seed: int = 0,
    size: tuple[int, int] = (128, 96),
    jitter: float = 1.0,
    workers: int | None = None,
) -> None:
    """Render single images of 96 species in NABirds' layout, equally many of each.

    Arguments and errors are those of `write_cub`, with at least 192 images. As in NABirds, the classes also contain inner nodes
    without images: the 24 families, whose numbers come before those of the species.
    """
    settings = _check("nabirds", images, 2 * SPECIES, seed, size, jitter)
    folder = Path(folder)
    if claim(folder, settings, _NABIRDS_FILES):
        return
    for species in range(SPECIES):
        (folder / f"images/{_label(species):04d}").mkdir(parents=True, exist_ok=True)
    render_all(_nabirds_chunk, folder, settings, images, workers, "labelled pictures")
    ids = [_uuid(seed, number) for number in range(images)]
    names = [f"{COLORS[family // len(SHAPES)]} {SHAPES[family % len(SHAPES)]}s".title() for family in range(FAMILIES)]
    for species in range(SPECIES):
        size_of, color, material, shape = attributes(species)
        names.append(f"{SIZES[size_of]} {MATERIALS[material]} {COLORS[color]} {SHAPES[shape]}".title())
    lists = {
        "image_class_labels": [f"{image} {_label(number % SPECIES)}" for number, image in enumerate(ids)],
        "train_test_split": [f"{image} {int(number // SPECIES % 2 == 0)}" for number, image in enumerate(ids)],
        "classes": [f"{number} {name}" for number, name in enumerate(names)],
        "hierarchy": [f"{_label(species)} {species // 4}" for species in range(SPECIES)],
        "sizes": [f"{image} {size[0]} {size[1]}" for image in ids],
        "images": [f"{image} {_nabirds_path(image, number)}" for number, image in enumerate(ids)],
    }
    for name, lines in lists.items():
        write_text(folder / f"{name}.txt", "\n".join(lines) + "\n")
    clear_parts(folder)


def attributes(species: int) -> tuple[int, int, int, int]:
    """Return size, color, material and shape of a species, 0 to 95; each four consecutive species have one color and shape."""
    family, kind = divmod(species, len(SIZES) * len(MATERIALS))
    return kind // len(MATERIALS), family // len(SHAPES), kind % len(MATERIALS), family % len(SHAPES)


def sample_portraits(species: Sequence[int], numbers: Sequence[int], seed: int, jitter: float) -> Scenes:
    """Draw scenes with one object of a given species, completely inside the image.

    Args:
        species: of each image, 0 to 95. numbers: of each image; with `seed`, they determine the scene.

    Raises:
        DiffcapError: no valid scene was found, because the jitter is too strong.
    """
    pending = torch.arange(len(numbers))
    drawn: list[tuple[Tensor, Scenes]] = []
    kinds, drawn_by = torch.tensor([attributes(each) for each in species]), torch.tensor(numbers) + _NABIRDS
    for attempt in range(_ATTEMPTS):
        scenes = sample_triples(drawn_by[pending] + attempt * _ATTEMPT_STEP, seed, jitter, objects=(2, 3)).before
        scenes = _only_the_first(scenes, kinds[pending])
        box = view_boxes(scenes)[:, 0].abs()
        limit = torch.tensor([HALF_VIEW[axis % 2] * (1 - 2 / PICTURE[axis % 2]) for axis in range(4)])
        good = (box < limit).all(1)
        drawn.append((pending[good], scenes[good]))
        pending = pending[~good]
        if not len(pending):
            break
    else:
        raise DiffcapError(
            f"blocks_nabirds: no position found for an object with jitter {jitter:g}; use a weaker jitter."
        )
    order = torch.cat([rows for rows, _ in drawn]).argsort()
    return Scenes.cat([scenes for _, scenes in drawn])[order]


def _only_the_first(scenes: Scenes, kinds: Tensor) -> Scenes:
    """Remove all objects but the first of each scene, and set its attributes to `kinds` (B, 4)."""
    own = {name: column.view(-1, 1) for name, column in zip(("size", "color", "material", "shape"), kinds.unbind(1))}
    kept = {name: getattr(scenes, name)[:, :1] for name in ("position", "yaw")}
    valid = torch.ones(len(scenes), 1, dtype=torch.bool)
    rest = {name: getattr(scenes, name) for name in ("eye", "target", "light", "light_centers", "intensity")}
    return Scenes(**own, valid=valid, **kept, **rest)


def _check(form: str, images: int, least: int, seed: int, size: tuple[int, int], jitter: float) -> Settings:
    if images < least:
        raise DiffcapError(f"blocks_{form}: images must be {least} or more, not {images}; fix it.")
    check_render_settings(size, jitter)
    return Settings(form, images, seed, (size[0], size[1]), float(jitter))


def _cub_chunk(folder: Path, settings: Settings, start: int) -> None:
    numbers = [_CUB + start + row for row in range(CHUNK)]
    scenes = sample_triples(numbers, settings.seed, settings.jitter).before
    images, index = render(scenes, settings.size)
    pixels = torch.stack([(index == slot).flatten(1).sum(1) for slot in range(scenes.size.shape[1])], 1)
    least = MIN_VISIBLE * settings.size[0] * settings.size[1] / (PICTURE[0] * PICTURE[1])
    descriptions = [
        describe(
            scenes, pixels >= least, [number * SENTENCES + turn for number in numbers], settings.seed, 1 + turn % 4
        )
        for turn in range(SENTENCES)
    ]
    rows = []
    for row in range(min(CHUNK, settings.images - start)):
        group = int(scenes.color[row, 0])
        name = f"{_cub_name(group, start + row)}.jpg"
        write_image(folder, folder / "CUB_200_2011/images" / _color_class(group) / name, encode_jpeg(images[row]))
        rows.append({"class": group, "sentences": [sentences[row] for sentences in descriptions]})
    write_part(folder, start, rows)


def _nabirds_chunk(folder: Path, settings: Settings, start: int) -> None:
    numbers = range(start, start + CHUNK)
    scenes = sample_portraits([number % SPECIES for number in numbers], numbers, settings.seed, settings.jitter)
    images, _ = render(scenes, settings.size)
    for number in numbers[: settings.images - start]:
        path = folder / "images" / _nabirds_path(_uuid(settings.seed, number), number)
        write_image(folder, path, encode_jpeg(images[number - start]))
    write_part(folder, start, [])


def encode_jpeg(image: Tensor) -> bytes:
    """Encode a (3, H, W) uint8 image as JPEG, with a quality that preserves the colors of small objects."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(image.cpu().permute(1, 2, 0).numpy()).save(file, "JPEG", quality=95, subsampling=0)
    return file.getvalue()


def _color_class(color: int) -> str:
    return f"{color + 1:03d}.{COLORS[color].title()}_Scene"


def _cub_name(color: int, number: int) -> str:
    return f"{COLORS[color].title()}_Scene_{number:06d}"


def _label(species: int) -> int:
    return FAMILIES + species


def _nabirds_path(image: str, number: int) -> str:
    return f"{_label(number % SPECIES):04d}/{image.replace('-', '')}.jpg"


def _uuid(seed: int, number: int) -> str:
    text = hashlib.sha256(f"blocks portrait {seed} {number}".encode()).hexdigest()
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:32]))
