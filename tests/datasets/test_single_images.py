"""CUB and NABirds in their official layouts and in IDC-PCL's preprocessed form."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.datasets.layouts import refusal, write_image, write_lines

from diffcap.datasets import describe, read_pairs

CLASSES = ("001.Black_footed_Albatross", "004.Groove_billed_Ani")
BIRD = "Black_Footed_Albatross_0046_18"
PATHS = (
    f"{CLASSES[0]}/{BIRD}",
    f"{CLASSES[1]}/Groove_Billed_Ani_0027_1615",
    f"{CLASSES[0]}/Black_Footed_Albatross_0009_34",
)


@pytest.fixture
def cub(tmp_path: Path) -> Path:
    """Both archives as they unpack; the images of a class come apart in images.txt, which they do not in the real one."""
    images, texts = tmp_path / "CUB_200_2011", tmp_path / "cvpr2016_cub"
    for number, path in enumerate(PATHS):
        write_image(images / f"images/{path}.jpg", number)
        write_image(images / f"images/{path}_rgb.jpg", number)  # the archive has files that images.txt does not name
        text = texts / f"text_c10/{path}.txt"
        text.parent.mkdir(parents=True, exist_ok=True)
        text.write_text("".join(f"a bird number {number} with a  beak, take {take}. \n" for take in range(10)))
    (images / "images.txt").write_text("".join(f"{n} {path}.jpg\n" for n, path in enumerate(PATHS, 1)))
    (texts / "testclasses.txt").write_text(f"{CLASSES[1]}\n059.California_Gull\n")
    return tmp_path


def test_cub_has_ten_captions_for_an_image_and_is_split_by_class(cub: Path) -> None:
    pairs = read_pairs("cub", cub)
    assert [(pair.id, pair.split) for pair in pairs] == [(PATHS[0], "train"), (PATHS[2], "train"), (PATHS[1], "val")]
    assert all(pair.after is None and len(pair.captions) == 10 and (cub / pair.before).is_file() for pair in pairs)
    assert pairs[2].before == f"CUB_200_2011/images/{PATHS[1]}.jpg"
    assert pairs[1].captions[3] == "a bird number 2 with a beak, take 3."
    assert pairs[2].extra == {"species": CLASSES[1]}
    (cub / f"cvpr2016_cub/text_c10/{PATHS[0]}.txt").write_bytes(b"a bird\xff\xfewith wings\n\n")
    assert read_pairs("cub", cub)[0].captions == ["a bird with wings"]  # bytes that are no letters are blanks


def test_archives_in_one_folder_and_captions_without_a_list_of_images(cub: Path) -> None:
    def found() -> dict[str, Any]:
        return {pair.id: (pair.split, pair.captions, pair.extra) for pair in read_pairs("cub", cub)}

    expected = found()
    for path in (cub / "cvpr2016_cub").iterdir():
        path.rename(cub / path.name)
    assert found() == expected
    shutil.rmtree(cub / "CUB_200_2011")
    assert found() == expected
    assert [pair.before for pair in read_pairs("cub", cub)] == [f"images/{PATHS[n]}.jpg" for n in (2, 0, 1)]  # by name


@pytest.mark.parametrize(
    ("path", "text", "words"),
    [
        ("cvpr2016_cub/text_c10", None, "no captions there (text_c10); unpack the captions"),
        ("cvpr2016_cub/testclasses.txt", None, "testclasses.txt: no such list; unpack the captions"),
        ("cvpr2016_cub/testclasses.txt", "059.Gull\n", "testclasses.txt names the class of no image"),
        ("CUB_200_2011/images.txt", "1 ../../x.jpg\n", "images.txt, line 1: the path '../../x.jpg' leads out of"),
        (f"cvpr2016_cub/text_c10/{PATHS[1]}.txt", " \n", "missing or empty (1 of 3 images have no sentences"),
    ],
)
def test_a_fault_of_cub_is_one_sentence(cub: Path, path: str, text: str | None, words: str) -> None:
    if text is None:
        (cub / path).rename(cub / "elsewhere")
    else:
        (cub / path).write_text(text)
    assert words in refusal("cub", cub)


IMAGES = {
    "0000139e-21dc-4d0c-bfe1-4cae3c85c829": ("0817", "817", "0"),
    "0000d9fc-4e02-4c06-a0af-a55cfb16b12b": ("0328", "328", "1"),
    "00019306-9d83-4334-b255-a447742edce3": ("0817", "817", "1"),
}
SPECIES = {"0": "Birds", "328": "Painted Bunting (Adult Male)", "817": "Oak Titmouse", "900": "A class without images"}


@pytest.fixture
def nabirds(tmp_path: Path) -> Path:
    for number, (image, (folder, _, _)) in enumerate(IMAGES.items()):
        write_image(tmp_path / f"images/{folder}/{image.replace('-', '')}.jpg", number)
    lists = {
        "images": [f"{image} {folder}/{image.replace('-', '')}.jpg" for image, (folder, _, _) in IMAGES.items()],
        "image_class_labels": [f"{image} {label}" for image, (_, label, _) in IMAGES.items()],
        "train_test_split": [f"{image} {train}" for image, (_, _, train) in IMAGES.items()],
        "sizes": [f"{image} 24 16" for image in IMAGES],
        "classes": [f"{number} {name}" for number, name in SPECIES.items()],
    }
    for name, lines in lists.items():
        (tmp_path / f"{name}.txt").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_nabirds_has_classes_numbered_from_0_and_no_captions(nabirds: Path, tmp_path_factory: Any) -> None:
    pairs = read_pairs("nabirds", nabirds)
    first, second, third = IMAGES
    classes = [(pair.id, pair.split, pair.extra["class"]) for pair in pairs]
    assert classes == [(second, "train", 0), (third, "train", 1), (first, "test", 1)]
    assert all(pair.after is None and not pair.captions and (nabirds / pair.before).is_file() for pair in pairs)
    assert pairs[0].extra == {"class": 0, "species": "Painted Bunting (Adult Male)", "size": [24, 16]}
    above = tmp_path_factory.mktemp("above")  # the archive as it unpacks
    (above / "nabirds").symlink_to(nabirds)
    (nabirds / "sizes.txt").unlink()
    found = read_pairs("nabirds", above)
    assert all((above / pair.before).is_file() and "size" not in pair.extra for pair in found) and len(found) == 3


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("images", None, "images.txt: no such list; unpack nabirds.tar.gz"),
        ("images", "abc\n", "images.txt, line 1: 'abc' has no value"),
        ("images", "a b.jpg\na c.jpg\n", "images.txt, line 2: 'a' is duplicated"),
        ("image_class_labels", "x 1\n", "no valid entry for 3 of the 3 images (first 0000139e"),
        ("train_test_split", "".join(f"{image} 2\n" for image in IMAGES), "split.txt: has no valid entry for 3"),
        ("sizes", f"{next(iter(IMAGES))} x y\n", "sizes.txt: has no valid entry for 1 of the 3 images (first 0000139e"),
        ("sizes", f"{next(iter(IMAGES))} 24 {'9' * 5000}\n", "sizes.txt: has no valid entry for 1 of the 3"),
        (
            "image_class_labels",
            "".join(f"{image} ²\n" for image in IMAGES),
            "image_class_labels.txt: has no valid entry for 3",
        ),
        ("classes", "817 Oak Titmouse\n", "classes.txt: has no valid entry for 1 of the 3 images (first 0000d9fc"),
    ],
)
def test_a_fault_of_nabirds_is_one_sentence(nabirds: Path, name: str, text: str | None, words: str) -> None:
    (nabirds / f"{name}.txt").unlink()
    if text is not None:
        (nabirds / f"{name}.txt").write_text(text)
    assert words in refusal("nabirds", nabirds)


def pair(first: str, second: str, one: int, two: int, label: int) -> dict[str, Any]:
    return {"img1": first, "img2": second, "class_id1": one, "class_id2": two, "label": label}


def test_captions_of_one_image_come_together(tmp_path: Path) -> None:
    lines = [{"img": f"{BIRD}.jpg", "description": ["a", "brown", "bird"]}, {"img": "Ani_1", "description": ["black"]}]
    write_lines(tmp_path / "train.json", [*lines, {"img": f"{BIRD}.jpg", "description": ["a", "bird", "."]}])
    write_lines(tmp_path / "val.jsonl", [{"img": "Gull_2", "description": [["a", "gull"], ["white"]]}])
    pairs = read_pairs("cub", tmp_path)
    captions = {BIRD: ["a brown bird", "a bird ."], "Ani_1": ["black"], "Gull_2": ["a gull", "white"]}
    assert {pair.id: pair.captions for pair in pairs} == captions
    assert [pair.before for pair in pairs] == [f"images/{id}.jpg" for id in captions]
    assert [pair.split for pair in pairs] == ["train", "train", "val"]
    assert all(pair.after is None for pair in pairs)
    assert describe("cub", pairs, tmp_path)["official"]["splits"]["train"] == [2, 8_855]
    (tmp_path / "text_c10").mkdir()
    assert "testclasses.txt: no such list" in refusal("cub", tmp_path)  # the official form comes first


def test_classified_images_of_all_pairs(tmp_path: Path) -> None:
    write_lines(tmp_path / "train.json", [pair("a", "b", 0, 554, 0), pair("b", "c.jpg", 554, 554, 1)])
    pairs = read_pairs("nabirds", tmp_path)
    assert {pair.id: pair.extra["class"] for pair in pairs} == {"a": 0, "b": 554, "c": 554}
    assert [pair.before for pair in pairs] == [f"images/{id}.jpg" for id in "abc"]
    assert describe("nabirds", pairs, tmp_path)["official"]["state"] == "part"


GOOD = pair("a", "b", 0, 1, 0)


@pytest.mark.parametrize(
    ("dataset", "rows", "words"),
    [
        ("cub", [{"img": 3, "description": ["x"]}], "train.json, line 1: "),
        ("cub", [{"img": "../x", "description": ["x"]}], "train.json, line 1: "),
        ("cub", [{"img": "x", "description": []}], "train.json, line 1: "),
        ("cub", [{"img": "x", "description": ["x"]}], "x is in val here and in train before"),
        ("nabirds", [GOOD, pair("a", "c", 3, 1, 0)], "line 2: a has class 3 here and class 0 before"),
        ("nabirds", [pair("a", "b", -1, 1, 0)], '"class_id1" must be'),
        ("nabirds", [GOOD, pair("c", "d", 554, 555, 0)], 'line 2: "class_id2" must be a whole number from 0 to 554'),
        ("nabirds", [pair("a", "", 0, 1, 0)], '"img2" must be a string'),
    ],
)
def test_a_malformed_line_is_one_sentence(tmp_path: Path, dataset: str, rows: list[Any], words: str) -> None:
    write_lines(tmp_path / "train.json", rows)
    write_lines(tmp_path / "val.json", [{"img": "x.jpg", "description": ["x"]}] if dataset == "cub" else [])
    assert words in refusal(dataset, tmp_path)
