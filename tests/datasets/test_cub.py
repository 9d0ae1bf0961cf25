"""CUB with its captions in the official layout, unpacked as the two archives or into one folder."""

import shutil
from pathlib import Path

import pytest
from tests.datasets.layouts import write_image

from diffcap.datasets import read_pairs
from diffcap.utils.errors import DiffcapError

CLASSES = ("001.Black_footed_Albatross", "004.Groove_billed_Ani")
NAMES = ("Black_Footed_Albatross_0046_18", "Black_Footed_Albatross_0009_34", "Groove_Billed_Ani_0027_1615")
PATHS = (f"{CLASSES[0]}/{NAMES[0]}", f"{CLASSES[1]}/{NAMES[2]}", f"{CLASSES[0]}/{NAMES[1]}")


@pytest.fixture
def official(tmp_path: Path) -> Path:
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


def test_images_are_records_with_ten_captions_split_by_class(official: Path) -> None:
    pairs = read_pairs("cub", official)
    assert [(pair.id, pair.split) for pair in pairs] == [(PATHS[0], "train"), (PATHS[2], "train"), (PATHS[1], "val")]
    assert all(pair.after is None and len(pair.captions) == 10 and (official / pair.before).is_file() for pair in pairs)
    assert pairs[2].before == f"CUB_200_2011/images/{PATHS[1]}.jpg"
    assert pairs[1].captions[3] == "a bird number 2 with a beak, take 3."
    assert pairs[2].extra == {"species": CLASSES[1]}


def test_the_archives_may_be_unpacked_into_one_folder(official: Path) -> None:
    expected = read_pairs("cub", official)
    for archive in ("CUB_200_2011", "cvpr2016_cub"):
        for path in (official / archive).iterdir():
            path.rename(official / path.name)
        (official / archive).rmdir()
    found = read_pairs("cub", official)
    assert [(pair.id, pair.split, pair.captions) for pair in found] == [(p.id, p.split, p.captions) for p in expected]
    assert found[0].before == f"images/{PATHS[0]}.jpg"


def test_bytes_that_are_no_letters_are_blanks(official: Path) -> None:
    (official / f"cvpr2016_cub/text_c10/{PATHS[0]}.txt").write_bytes(b"a bird\xff\xfewith wings\n\n")
    assert read_pairs("cub", official)[0].captions == ["a bird with wings"]


def test_captions_alone_need_no_list_of_images(official: Path) -> None:
    expected = {pair.id: (pair.split, pair.captions, pair.extra) for pair in read_pairs("cub", official)}
    shutil.rmtree(official / "CUB_200_2011")
    found = read_pairs("cub", official)
    assert {pair.id: (pair.split, pair.captions, pair.extra) for pair in found} == expected
    assert [pair.id for pair in found] == [PATHS[2], PATHS[0], PATHS[1]]  # by name
    assert found[0].before == f"images/{PATHS[2]}.jpg"


@pytest.mark.parametrize(
    ("spoil", "output"),
    [
        (lambda f: shutil.rmtree(f / "cvpr2016_cub/text_c10"), r"no captions there \(text_c10\); unpack the captions"),
        (lambda f: (f / "cvpr2016_cub/testclasses.txt").unlink(), "no list of held-out classes there"),
        (lambda f: (f / "CUB_200_2011/images.txt").write_text("1 a.png\n"), r"images\.txt, line 1: expected"),
        (
            lambda f: (f / f"cvpr2016_cub/text_c10/{PATHS[1]}.txt").write_text(" \n"),
            "missing or empty \\(1 of 3 images have no sentences",
        ),
        (
            lambda f: (f / "cvpr2016_cub/testclasses.txt").write_text("059.Gull\n"),
            "no image has one of these classes",
        ),
    ],
)
def test_what_is_missing_is_one_sentence(official: Path, spoil, output: str) -> None:
    spoil(official)
    with pytest.raises(DiffcapError, match=output) as caught:
        read_pairs("cub", official)
    assert "\n" not in str(caught.value)
