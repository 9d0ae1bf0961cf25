from collections import Counter
from pathlib import Path

import pytest
from tests.datasets.layouts import write_lines

from diffcap.commands.pairs import find_pairs
from diffcap.datasets import read_pairs
from diffcap.records import ChangePair
from diffcap.utils.errors import DiffcapError


def row(number: int, **changes: object) -> dict[str, object]:
    return {"before": f"a/{number}.jpg", "after": f"b/{number}.jpg", "captions": [f"cup {number} is gone"], **changes}


def refusal(folder: Path) -> str:
    with pytest.raises(DiffcapError) as caught:
        read_pairs("desk", folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_every_key_arrives(tmp_path: Path) -> None:
    full = row(1, id="one", split="test", change_type="drop", is_distractor=False, room="kitchen")
    write_lines(tmp_path / "pairs.jsonl", [full, row(2, split="train", is_distractor=True)])
    assert read_pairs("desk", tmp_path) == [
        ChangePair("one", "a/1.jpg", "b/1.jpg", ["cup 1 is gone"], "test", "drop", False, {"room": "kitchen"}),
        ChangePair("2", "a/2.jpg", "b/2.jpg", ["cup 2 is gone"], "train", None, True),
    ]


def test_ids_are_names_of_files(tmp_path: Path) -> None:
    def ids(*images: tuple[str, str]) -> list[str]:
        rows = [row(0, before=before, after=after, split="train") for before, after in images]
        write_lines(tmp_path / "pairs.jsonl", rows)
        found = [pair.id for pair in read_pairs("desk", tmp_path)]
        assert found == [pair.id for pair in find_pairs(str(tmp_path))[0]]  # the same for `diffcap caption`
        return found

    assert ids(("a/2.x.jpg", "b/2.png"), ("a/10.jpg", "b/10.png")) == ["2.x", "10"]
    assert ids(("1/a.jpg", "1/b.jpg"), ("2/a.jpg", "2/b.jpg")) == ["1/a", "2/a"]
    assert ids(("a/1.jpg", "b/1.jpg"), ("a/1.jpg", "c/2.jpg")) == ["1-1", "1-2"]
    assert ids(("a/1.jpg", "b/1.jpg"), ("a/1.jpg", "b/1.jpg")) == ["000001", "000002"]


def test_without_splits_they_are_drawn_once_for_all(tmp_path: Path) -> None:
    rows = [row(number) for number in range(200)]
    write_lines(tmp_path / "pairs.jsonl", rows)
    pairs = read_pairs("desk", tmp_path)
    assert Counter(pair.split for pair in pairs) == {"train": 160, "val": 20, "test": 20}
    assert pairs == read_pairs("desk", tmp_path)
    splits = {pair.before: pair.split for pair in pairs}
    write_lines(tmp_path / "pairs.jsonl", rows[::-1])
    assert {pair.before: pair.split for pair in read_pairs("desk", tmp_path)} == splits
    assert [splits[f"a/{n}.jpg"] for n in range(200)] != sorted(splits.values(), key=["train", "val", "test"].index)


def test_the_same_two_images_fall_into_one_split(tmp_path: Path) -> None:
    forth = [row(number) for number in range(60)]
    back = [{**row(number), "before": f"b/{number}.jpg", "after": f"a/{number}.jpg"} for number in range(60)]
    write_lines(tmp_path / "pairs.jsonl", forth + back)
    pairs = read_pairs("desk", tmp_path)
    assert [pair.split for pair in pairs[:60]] == [pair.split for pair in pairs[60:]]
    assert Counter(pair.split for pair in pairs) == {"train": 96, "val": 12, "test": 12}


def test_no_image_of_the_test_pairs_is_seen_in_training(tmp_path: Path) -> None:
    """A change and a distractor share their first image; a row of photographs shares each with the next."""
    scenes = [row(number, after=f"{kind}/{number}.jpg") for number in range(50) for kind in "bc"]
    film = [row(0, before=f"film/{number}.jpg", after=f"film/{number + 1}.jpg") for number in range(5)]
    write_lines(tmp_path / "pairs.jsonl", scenes + film)
    images: dict[str, set[str]] = {"train": set(), "val": set(), "test": set()}
    for pair in read_pairs("desk", tmp_path):
        images[pair.split] |= {pair.before, pair.after}
    assert all(images.values())
    assert not images["train"] & images["test"] and not images["train"] & images["val"]
    assert len({split for split, seen in images.items() for image in seen if image.startswith("film")}) == 1


def test_an_image_has_one_name_however_it_is_spelt(tmp_path: Path) -> None:
    spelt = ["film/0.jpg", "./film/0.jpg", "film//0.jpg", "film/./0.jpg"]
    film = [row(number, before=path, after=f"film/{number + 1}.jpg") for number, path in enumerate(spelt)]
    write_lines(tmp_path / "pairs.jsonl", [*film, *(row(number) for number in range(30))])
    found = [pair for pair in read_pairs("desk", tmp_path) if "film" in pair.before]
    assert {pair.before for pair in found} == {"film/0.jpg"} and len({pair.split for pair in found}) == 1
    write_lines(tmp_path / "pairs.jsonl", [row(0, before="./..//b.jpg")])
    assert "leads out of the dataset's folder" in refusal(tmp_path)


@pytest.mark.parametrize("name", "abcdefgh")  # where the large group comes in the drawn order depends on its name
def test_a_large_group_does_not_take_the_whole_of_a_split(tmp_path: Path, name: str) -> None:
    chain = [row(0, before=f"{name}x/{number:02}.jpg", after=f"{name}x/{number + 1:02}.jpg") for number in range(60)]
    write_lines(tmp_path / "pairs.jsonl", chain + [row(number, before=f"d5/{number}.jpg") for number in range(40)])
    assert Counter(pair.split for pair in read_pairs("desk", tmp_path)) == {"train": 80, "val": 10, "test": 10}
    write_lines(tmp_path / "pairs.jsonl", chain + chain[:1] + [row(1), row(2)])
    assert Counter(pair.split for pair in read_pairs("desk", tmp_path))["train"] == 61


def test_three_pairs_are_enough_and_two_are_not(tmp_path: Path) -> None:
    write_lines(tmp_path / "pairs.jsonl", [row(number) for number in range(3)])
    assert sorted(pair.split for pair in read_pairs("desk", tmp_path)) == ["test", "train", "val"]
    write_lines(tmp_path / "pairs.jsonl", [row(1), row(1), row(2)])
    assert "form only 2 groups without common images" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("bad", "output"),
    [
        (row(2, before=None), '"before" must be the path of an image, found None'),
        (row(2, after="/data/b.jpg"), "the path '/data/b.jpg' leads out of the dataset's folder; write it relative"),
        (row(2, before="../b.jpg"), "the path '../b.jpg' leads out of the dataset's folder; write it relative"),
        (row(2, captions="one"), "\"captions\" must be a list of sentences, found 'one'"),
        (row(2, captions=["", "x"]), '"captions" has a blank sentence; fill it'),
        (row(2, captions=["x", "\u200b\ufeff"]), '"captions" has a blank sentence; fill it'),
        (row(2, id=" \u200b"), '"id" must be a string'),
        (row(2, id=["a"]), '"id" must be a string'),
        (row(2, captions=[], split="train"), "a training pair needs at least one caption"),
        (row(2, split="dev"), "\"split\" must be one of train, val, test, found 'dev'"),
        (row(2, id="1", split="val"), "id '1' is already used"),
        (row(2, is_distractor=1), '"is_distractor" true or false'),
        (
            row(2, split="val", change_type="total"),
            "\"change_type\" is 'total', which is a reserved name; use another name",
        ),
        (row(2), 'no "split", while other lines have one'),
        (row(2, id=float("nan")), "NaN, which is not a finite number"),
        (row(2, id=["1"]), "\"id\" must be a string, found ['1']"),
        (row(2, split="val", changed="the cup"), '"changed" is reserved for the dataset blocks'),
        (row(2, split="val", changeflag=0), '"changeflag" is not a key of this format; write "is_distractor"'),
        (row(2, split="val", mask=3), '"mask" must be the path of an image, found 3'),
        (row(2, split="val", mask="../m.png"), "leads out of the dataset's folder"),
        (row(2, split="val", viewpoint_iou="high"), "\"viewpoint_iou\" must be a number, found 'high'"),
        (row(2, split="val", boxes=[[0, 0, 5, 5]]), '"boxes" must be {"before": [x0, y0, x1, y1] or null, "after"'),
    ],
)
def test_a_malformed_line_is_named_by_number(tmp_path: Path, bad: dict[str, object], output: str) -> None:
    write_lines(tmp_path / "pairs.jsonl", [row(1, split="train"), bad])
    assert f"{tmp_path / 'pairs.jsonl'}, line 2: " in refusal(tmp_path) and output in refusal(tmp_path)


def test_a_drawn_training_pair_needs_a_caption_too(tmp_path: Path) -> None:
    write_lines(tmp_path / "pairs.jsonl", [row(number, captions=[]) for number in range(3)])
    assert "line 1: this pair has no caption" in refusal(tmp_path)


def test_a_name_without_a_reader_needs_pairs(tmp_path: Path) -> None:
    assert "no pairs.jsonl there" in refusal(tmp_path) and "clevr_change" in refusal(tmp_path)
    (tmp_path / "pairs.jsonl").write_text("\n")
    assert "name no pair" in refusal(tmp_path)
