import pytest

from diffcap.datasets.sizes import against_official
from diffcap.errors import DiffcapError
from diffcap.records import ChangePair


def images(split: str, count: int, classes: int = 0) -> list[ChangePair]:
    extra = [{"class": number % classes} if classes else {} for number in range(count)]
    return [ChangePair(f"{split}{n}", "x", None, ["y"], split, extra=extra[n]) for n in range(count)]


def test_a_whole_dataset_has_the_released_sizes() -> None:
    cub = [*images("train", 8_855), *images("val", 2_933)]
    assert against_official("cub", cub) == "cub: the whole of its 11,788 images (train 8,855, val 2,933)"
    with pytest.raises(DiffcapError, match=r"11,788 images \(train 8,854, val 2,934\), where the released one has"):
        against_official("cub", [*images("train", 8_854), *images("val", 2_934)])
    birds = [*images("train", 23_929, 555), *images("test", 24_633, 555)]
    assert against_official("nabirds", birds).startswith("nabirds: the whole of its 48,562 images")
    with pytest.raises(DiffcapError, match="classes 554"):
        against_official("nabirds", [*images("train", 23_929, 554), *images("test", 24_633, 554)])
    with pytest.raises(DiffcapError, match=r"cub: 11,789 images .* fetch its lists again"):
        against_official("cub", [*cub, *images("test", 1)])


def test_a_part_is_told_as_a_part() -> None:
    assert against_official("cub", images("train", 20)) == "cub: a part, 20 of its 11,788 images (train 20, val 0)"
    assert "a part, 7 of its 48,562 images (train 7, test 0, classes 3)" in against_official(
        "nabirds", images("train", 7, 3)
    )
    assert against_official("blocks_cub", images("train", 20)) == ""
