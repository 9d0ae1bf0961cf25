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


def write_json(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


# What CLEVR-DC says of ids 0, 1, 2, ...: one kind after the other.
DC_CAPTIONS = (
    ("color", ["the small brown rubber cube changed to green", "the brown block that is behind the ball turned green"]),
    ("material", ["the big red cube became shiny", "the red block turned metallic"]),
    ("add", ["a gray sphere was added", "there is a new gray ball"]),
    ("drop", ["the cyan cylinder is no longer there", "somebody removed the cyan cylinder"]),
    ("move", ["the tiny yellow ball moved", "the yellow sphere changed its location"]),
    (None, ["the scene is the same as before", "no change was made", "there is no difference"]),
)


def write_clevr_dc(folder: Path, splits: dict[str, list[int]], renamed: bool = False) -> Path:
    """CLEVR-DC as upstream has it, or as DIRL renames it."""
    before, after, captions, split, name = (
        ("images", "sc_images", "change_captions.json", "splits.json", "{:06d}.png")
        if renamed
        else ("bef", "aft", "captions.json", "split.json", "{}.png")
    )
    numbers = [number for group in splits.values() for number in group]
    for number in numbers:
        write_image(folder / before / name.format(number), number)
        write_image(folder / after / name.format(number), number + 9)
    key = name if renamed else "{}"
    write_json(folder / captions, {key.format(number): DC_CAPTIONS[number % 6][1] for number in numbers})
    write_json(folder / split, splits)
    return folder


def write_spot_the_diff(folder: Path, images: bool = True) -> Path:
    """Spot-the-Diff: two annotators of one pair in train, an empty sentence in test."""
    rows = {
        "train": [
            ("7", ["the red car has moved", "a man is gone"]),
            ("12", ["there are no differences"]),
            ("7", ["the car left"]),
            *((str(number), ["the car has moved", "a man is gone"]) for number in range(20, 26)),
        ],
        "val": [("3", ["a person appeared"]), ("4", ["the van is gone", "a person appeared"])],
        "test": [("5", ["the van is gone", "two people left the lot"]), ("6", [""])],
    }
    for split, entries in rows.items():
        value = [{"img_id": image, "sentences": sentences} for image, sentences in entries]
        write_json(folder / f"annotations/{split}.json", value)
        for image, _ in entries if images else ():
            write_image(folder / f"resized_images/{image}.png", int(image))
            write_image(folder / f"resized_images/{image}_2.png", int(image) + 1)
    return folder


def write_image_editing_request(folder: Path) -> Path:
    """Image-Editing-Request: one image pair under two uids in train, and under one more in test."""
    names = {"train": "train.json", "val": "valid.json", "test": "test.json"}
    rows = {
        "train": [("Z_1", 0, ["Making dark color "]), ("Z_2", 0, ["Brighten the sky, please.  Thanks"])]
        + [(f"Z_{n}", n, ["Remove the man", "take the people out"][n % 2 :][:1]) for n in range(3, 9)],
        "val": [("R_1", 20, ["Add a hat", "put a hat on him", "Hat!"]), ("R_2", 21, ["Crop it", "crop", "cut it"])],
        "test": [("R_3", 0, ["Darker.", "make it dark", "dark"]), ("R_4", 30, ["Remove the dog", "no dog", "dog"])],
    }
    for split, entries in rows.items():
        value = [
            {"img0": f"{number}.jpg", "img1": f"{number}_edit.png", "sents": sents, "uid": uid}
            for uid, number, sents in entries
        ]
        write_json(folder / names[split], value)
        for _, number, _ in entries:
            write_image(folder / f"images/{number}.jpg", number)
            write_image(folder / f"images/{number}_edit.png", number + 1)
    return folder


def write_pcl_lines(folder: Path, train: list[int], val: list[int], test: list[int]) -> Path:
    """CLEVR-Change as IDC-PCL's authors preprocessed it."""
    for split, numbers in (("train", train), ("val", val), ("test", test)):
        rows = [
            {"img1": f"CLEVR_default_{n:06d}", "img2": f"CLEVR_{kind}_{n:06d}", "sentences": output}
            for n in numbers
            for kind, output in (("semantic", [f"the cube {n} turned red"]), ("nonsemantic", ["nothing changed"]))
        ]
        write_lines(folder / f"{split}.json", rows)
    return folder
