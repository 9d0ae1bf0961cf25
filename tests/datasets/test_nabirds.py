"""NABirds in its official layout."""

from pathlib import Path

import pytest
from tests.datasets.layouts import write_image

from diffcap.datasets import read_pairs
from diffcap.utils.errors import DiffcapError

IMAGES = {
    "0000139e-21dc-4d0c-bfe1-4cae3c85c829": ("0817", "817", "0"),
    "0000d9fc-4e02-4c06-a0af-a55cfb16b12b": ("0328", "328", "1"),
    "00019306-9d83-4334-b255-a447742edce3": ("0817", "817", "1"),
}
CLASSES = {"0": "Birds", "328": "Painted Bunting (Adult Male)", "817": "Oak Titmouse", "900": "A class without images"}


@pytest.fixture
def official(tmp_path: Path) -> Path:
    for number, (image, (folder, _, _)) in enumerate(IMAGES.items()):
        write_image(tmp_path / f"images/{folder}/{image.replace('-', '')}.jpg", number)
    lists = {
        "images": [f"{image} {folder}/{image.replace('-', '')}.jpg" for image, (folder, _, _) in IMAGES.items()],
        "image_class_labels": [f"{image} {label}" for image, (_, label, _) in IMAGES.items()],
        "train_test_split": [f"{image} {train}" for image, (_, _, train) in IMAGES.items()],
        "sizes": [f"{image} 24 16" for image in IMAGES],
        "classes": [f"{number} {name}" for number, name in CLASSES.items()],
    }
    for name, lines in lists.items():
        (tmp_path / f"{name}.txt").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_images_have_classes_numbered_from_0_and_no_captions(official: Path) -> None:
    pairs = read_pairs("nabirds", official)
    first, second, third = IMAGES
    assert [(pair.id, pair.split, pair.extra["class"]) for pair in pairs] == [
        (second, "train", 0),
        (third, "train", 1),
        (first, "test", 1),
    ]
    assert all(pair.after is None and not pair.captions and (official / pair.before).is_file() for pair in pairs)
    assert pairs[0].extra == {"class": 0, "species": "Painted Bunting (Adult Male)", "size": [24, 16]}


def test_the_archive_may_stand_as_it_unpacks(official: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    above = tmp_path_factory.mktemp("above")
    (above / "nabirds").symlink_to(official)
    (official / "sizes.txt").unlink()
    found = read_pairs("nabirds", above)
    assert all((above / pair.before).is_file() and "size" not in pair.extra for pair in found) and len(found) == 3


@pytest.mark.parametrize("label", ["²", "9" * 5000], ids=["no number", "too long"])
def test_a_class_that_is_no_number(official: Path, label: str) -> None:
    (official / "image_class_labels.txt").write_text("".join(f"{image} {label}\n" for image in IMAGES))
    (official / "classes.txt").write_text(f"{label} Odd Titmouse\n")
    with pytest.raises(DiffcapError, match=r"classes\.txt: has no valid entry for 3 of the 3 images \(first 0000139e"):
        read_pairs("nabirds", official)


@pytest.mark.parametrize(
    ("name", "text", "output"),
    [
        ("images.txt", None, r"images\.txt: no such list; unpack nabirds\.tar\.gz"),
        ("images.txt", "abc\n", r"images\.txt, line 1: 'abc' has no value"),
        ("images.txt", "a b.jpg\na c.jpg\n", r"images\.txt, line 2: 'a' is duplicated"),
        ("image_class_labels.txt", "x 1\n", r"no valid entry for 3 of the 3 images \(first 0000139e"),
        ("train_test_split.txt", "x 1\n", r"split\.txt: has no valid entry for 3"),
        ("sizes.txt", f"{next(iter(IMAGES))} x y\n", "0000139e.* must have a width and a height, found 'x y'"),
        ("sizes.txt", f"{next(iter(IMAGES))} 24\n", "must have a width and a height, found '24'"),
        ("sizes.txt", f"{next(iter(IMAGES))} 24 {'9' * 5000}\n", "must have a width and a height, found '24 999"),
        (
            "classes.txt",
            "817 Oak Titmouse\n",
            r"classes\.txt: has no valid entry for 1 of the 3 images \(first 0000d9fc",
        ),
        (
            "train_test_split.txt",
            "\n".join(f"{image} 2" for image in IMAGES),
            r"split\.txt: has no valid entry for 3",
        ),
    ],
)
def test_what_is_missing_is_one_sentence(official: Path, name: str, text: str | None, output: str) -> None:
    (official / name).unlink()
    if text is not None:
        (official / name).write_text(text)
    with pytest.raises(DiffcapError, match=output) as caught:
        read_pairs("nabirds", official)
    assert "\n" not in str(caught.value)
