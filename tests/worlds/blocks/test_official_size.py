"""The dataset of `make rehearsal`: CLEVR-Change's counts and layout, few distinct images."""

import os
from collections import Counter
from pathlib import Path

import pytest

from diffcap.datasets import clevr_change
from diffcap.datasets.images import check_images, image_paths
from diffcap.datasets.official import compare
from diffcap.records import ChangePair
from diffcap.utils.errors import DiffcapError
from diffcap.worlds.blocks.official_size import caption_count, rendered_image, split_numbers, write

KINDS = ("color", "material", "add", "drop", "move")


def test_the_official_counts() -> None:
    splits = split_numbers()
    assert {split: len(numbers) for split, numbers in splits.items()} == {"train": 33_830, "val": 1_988, "test": 3_985}
    numbers = [number for split in splits.values() for number in split]
    assert len(set(numbers)) == 39_803 and min(numbers) >= 0 and max(numbers) < 40_000
    assert Counter(number // 8000 for number in splits["test"]) == dict.fromkeys(range(5), 797)
    counts = [caption_count(pair) for pair in range(2 * 39_803)]
    assert sum(counts) == 493_735 and set(counts) == {6, 7}
    pairs = [
        ChangePair(f"{number}{suffix}", "a", "b", ["x"], split, None if suffix else KINDS[number // 8000], bool(suffix))
        for split, of_split in splits.items()
        for number in of_split
        for suffix in ("", "_n")
    ]
    found = compare("clevr_change", pairs, Path("x"))  # also compares the numbers of each change type
    assert found is not None and found["state"] == "whole"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("official") / "source"
    write(folder, scenes=60, rendered=15)
    return folder


def test_the_layout_is_read_as_the_official_one(written: Path) -> None:
    pairs = clevr_change.read(written)
    assert Counter(pair.split for pair in pairs) == {"train": 2 * 49, "val": 2 * 5, "test": 2 * 6}
    assert Counter(pair.change_type for pair in pairs) == {None: 60, **dict.fromkeys(KINDS, 12)}
    assert all(len(set(pair.captions)) == len(pair.captions) and len(pair.captions) in (6, 7) for pair in pairs)
    assert sum(len(pair.captions) for pair in pairs) == 120 * 493_735 // (2 * 39_803)
    colors = [text for pair in pairs if pair.change_type == "color" for text in pair.captions]
    assert all(any(word in text for word in ("became", "turned", "changed", "now")) for text in colors)
    paths = image_paths(pairs)
    assert len(paths) == 180 and check_images(written, paths) == []
    assert {rendered_image(path, 15) for path in paths} == {
        path.relative_to(written).as_posix() for path in (written / "rendered").glob("*/*.png")
    }
    assert all((written / path).samefile(written / rendered_image(path, 15)) for path in paths)


def test_the_rendered_image_has_the_same_change_type(written: Path) -> None:
    types = {pair.id: pair.change_type for pair in clevr_change.read(written / "rendered")}
    for pair in clevr_change.read(written):
        assert pair.is_distractor or types[rendered_image(pair.after, 15)[-10:]] == pair.change_type


def test_a_second_call_writes_nothing_and_other_settings_are_refused(written: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in written.rglob("*")}
    write(written, scenes=60, rendered=15)
    assert {path: path.stat().st_mtime_ns for path in written.rglob("*")} == before
    with pytest.raises(DiffcapError, match=r"other settings \(scenes\); choose another folder"):
        write(written, scenes=61, rendered=15)


def test_an_interrupted_one_is_completed(written: Path, tmp_path: Path) -> None:
    folder = tmp_path / "source"
    write(folder, scenes=60, rendered=15)
    (folder / "splits.json").unlink()
    lost = next((folder / "nsc_images").iterdir())
    lost.unlink()
    write(folder, scenes=60, rendered=15)
    assert lost.is_file() and (folder / "splits.json").read_bytes() == (written / "splits.json").read_bytes()


def test_a_file_system_without_hard_links_gets_symbolic_ones(
    written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    write(tmp_path / "source", scenes=15, rendered=15)
    paths = image_paths(clevr_change.read(tmp_path / "source"))
    assert check_images(tmp_path / "source", paths) == [] and (tmp_path / "source" / paths[0]).is_symlink()
    monkeypatch.setattr(os, "symlink", refuse)
    with pytest.raises(DiffcapError, match="neither hard links nor symbolic links"):
        write(tmp_path / "other", scenes=15, rendered=15)


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"scenes": 14}, "--scenes is 14; give a number from 15 to 39,803"),
        ({"scenes": 40_000}, "--scenes is 40000"),
        ({"rendered": 16}, "--rendered is 16; give a multiple of 5"),
    ],
)
def test_numbers_out_of_range_are_refused(tmp_path: Path, options: dict[str, int], fault: str) -> None:
    with pytest.raises(DiffcapError, match=fault):
        write(tmp_path / "source", **options)
    assert not (tmp_path / "source").exists()
