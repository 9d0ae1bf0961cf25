"""Datasets in their official layouts, written small for tests."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from diffcap.datasets import no_change, photos, read_pairs
from diffcap.utils.errors import DiffcapError

BIRD_COLUMNS = photos.BIRDS_COLUMNS
NO_CHANGE_FIVE = no_change.LEVIR_CC  # the captions of every pair without change in LEVIR-CC and WHU-CDC


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
    kinds: dict[str, list[str]] = {"color": [], "add": []}
    for number in numbers:
        kinds["add" if number % 2 else "color"].append(f"{number:06d}.png")
    write_json(folder / "change_captions.json", changed)
    write_json(folder / "no_change_captions.json", {key: ["nothing changed", "no change"] for key in changed})
    write_json(folder / "splits.json", {"train": train, "val": val, "test": test})
    write_json(folder / "type_mapping.json", kinds)
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


def change(path: Path, edit: Callable[[Any], Any]) -> None:
    """Change the value of a JSON file in place."""
    value = json.loads(path.read_text())
    edit(value)
    write_json(path, value)


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


def karpathy_entry(split: str, name: str, captions: Iterable[str], flag: int | None = None) -> dict[str, Any]:
    """An entry of LEVIR-CC's JSON file."""
    rows = [
        {"tokens": text.split(" "), "raw": f" {text} .", "imgid": 0, "sentid": n} for n, text in enumerate(captions)
    ]
    flags = {} if flag is None else {"changeflag": flag}
    head = {"filepath": split, "filename": name, "imgid": 0}
    return {**head, "sentences": rows, "split": split, **flags, "sentids": list(range(len(rows)))}


def write_mask(path: Path, value: int) -> None:
    """A mask of three equal channels, with `value` in one corner."""
    path.parent.mkdir(parents=True, exist_ok=True)
    mask = Image.new("RGB", (24, 16))
    mask.putpixel((0, 0), (value, value, value))
    mask.save(path)


def levir_entries(numbers: dict[str, list[int]], flags: bool = True) -> list[dict[str, Any]]:
    """Entries of LEVIR-CC, or of WHU-CDC: changes for even numbers, no change for odd ones; five captions a pair."""
    return [
        karpathy_entry(
            split,
            f"{split}_{n:06d}.png",
            NO_CHANGE_FIVE
            if n % 2
            else [f"{text} {n}" for text in ("a road is built", "houses appear", "road's end", "a villa", "a villa")],
            (1 - n % 2) if flags else None,
        )
        for split, group in numbers.items()
        for n in group
    ]


def write_levir(
    folder: Path,
    numbers: dict[str, list[int]],
    flags: bool = True,
    masks: bool = False,
    name: str = "LevirCCcaptions.json",
) -> Path:
    """LEVIR-CC; with masks LEVIR-MCI or, by its name, WHU-CDC. The masks fit the flags."""
    write_json(folder / name, {"images": levir_entries(numbers, flags)})
    for split, group in numbers.items():
        for n in group:
            for number, side in enumerate("AB"):
                write_image(folder / f"images/{split}/{side}/{split}_{n:06d}.png", n + number)
            if masks:
                write_mask(folder / f"images/{split}/label/{split}_{n:06d}.png", 0 if n % 2 else (128, 255)[n % 4 // 2])
    return folder


def write_second_cc(folder: Path) -> Path:
    """SECOND-CC: two training pairs, one of them with an augmented view, and one pair in val and in test."""
    names = {"train": ["00003", "00003_random_augment_1", "00017"], "val": ["00021"], "test": ["00040"]}
    unchanged = {"00017": no_change.SECOND_CC}
    entries = [
        karpathy_entry(split, f"{name}.png", unchanged.get(name, ["a lake has dried"] * 5), int(name not in unchanged))
        for split, group in names.items()
        for name in group
    ]
    write_json(folder / "SECOND-CC-AUG.json", {"images": entries})
    for entry in entries:
        for number, side in enumerate("AB"):
            write_image(folder / entry["split"] / "rgb" / side / entry["filename"], number)
            write_image(folder / entry["split"] / "sem" / side / entry["filename"], number)
    return folder


def write_dubai_cc(folder: Path) -> Path:
    """Dubai-CC: three JSON files without flags and tokens, and 50 x 50 tiles."""
    rows = {
        "Train": {
            "0_0.tif": ["A new road was built.", "Houses appear in the desert."],
            "0_50.tif": ["Nothing has changed."] * 2,
        },
        "Validation": {"50_0.tif": ["An island appears near the coast.", "New island."]},
        "Test": {
            "50_50.tif": ["No changes in this area.", "A very small road may be new."],
            "50_100.tif": ["A lake dried up."],
        },
    }
    for split, tiles in rows.items():
        images = [{"filename": name, "sentences": [{"raw": text} for text in texts]} for name, texts in tiles.items()]
        write_json(folder / f"description_jsontr_te_val/{split}_Dubai_CC.json", {"images": images})
        for name in tiles:
            for year in (2000, 2010):
                write_image(folder / f"imgs_tiles/RGB/500_{year}/{name}", year, (50, 50))
    return folder


def refusal(dataset: str, folder: Path, **options: bool) -> str:
    """The one sentence with which a folder is refused."""
    with pytest.raises(DiffcapError) as caught:
        read_pairs(dataset, folder, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)
