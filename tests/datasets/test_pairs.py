import unicodedata
from collections import Counter
from pathlib import Path

import pytest
from tests.datasets.layouts import refusal, write_image, write_json, write_lines

from diffcap.commands.data import prepare
from diffcap.commands.pairs import find_pairs
from diffcap.datasets import describe, read_pairs
from diffcap.records import ChangePair
from diffcap.utils.errors import DiffcapError


def row(number: int, **changes: object) -> dict[str, object]:
    return {"before": f"a/{number}.jpg", "after": f"b/{number}.jpg", "captions": [f"cup {number} is gone"], **changes}


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


@pytest.mark.parametrize("form", ["pairs.jsonl", "karpathy"])
def test_names_in_another_unicode_normal_form_are_found(tmp_path: Path, form: str) -> None:
    composed = "caf\u00e9.png"
    decomposed = unicodedata.normalize("NFD", composed)
    for side in ("A", "B", "label"):
        write_image(tmp_path / side / decomposed)
    if form == "karpathy":
        entry = {"filename": composed, "split": "train", "sentences": [{"raw": "a wall"}], "changeflag": 1}
        write_json(tmp_path / "captions.json", {"images": [entry]})
    else:
        paths = {"before": f"A/{composed}", "after": f"B/{composed}", "mask": f"label/{composed}"}
        write_lines(tmp_path / "pairs.jsonl", [row(0, split="train", **paths)])
    (pair,) = read_pairs("desk", tmp_path)
    assert [*pair.images, pair.extra["mask"]] == [f"{side}/{decomposed}" for side in ("A", "B", "label")]


def test_without_splits_they_are_drawn_once_for_all(tmp_path: Path) -> None:
    rows = [row(number) for number in range(200)]
    splits = []
    for order in (rows, rows[::-1]):
        write_lines(tmp_path / "pairs.jsonl", order)
        splits.append({pair.before: pair.split for pair in read_pairs("desk", tmp_path)})
    assert Counter(splits[0].values()) == {"train": 160, "val": 20, "test": 20}
    assert splits[0] == splits[1]


@pytest.mark.parametrize("typed", [False, True])
def test_no_image_of_the_test_pairs_is_seen_in_training(tmp_path: Path, typed: bool) -> None:
    """A change and a distractor share their first image; a row of photographs shares each with the next."""
    scenes = [row(number, after=f"{kind}/{number}.jpg") for number in range(50) for kind in "bc"]
    film = [row(0, before=f"film/{number}.jpg", after=f"film/{number + 1}.jpg") for number in range(5)]
    if typed:  # change types do not part them
        scenes = [{**each, "change_type": f"type{n % 3}", "is_distractor": n % 2 == 1} for n, each in enumerate(scenes)]
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


@pytest.mark.parametrize("name", "abcd")  # where the large group comes in the drawn order depends on its name
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
    assert "form only 2 groups without common images" in refusal("desk", tmp_path)
    write_lines(tmp_path / "pairs.jsonl", [row(number, captions=[]) for number in range(3)])
    assert "line 1: this pair has no caption" in refusal("desk", tmp_path)
    write_lines(tmp_path / "pairs.jsonl", [row(1, captions=[], split="train")])
    assert "the training pair '1' has no caption" in refusal("desk", tmp_path)
    write_lines(tmp_path / "pairs.jsonl", [])
    assert "name no pair" in refusal("desk", tmp_path)


@pytest.mark.parametrize(
    ("counts", "held_out"),
    [
        ({"add": 22, "move": 4, "color": 4}, {"val": 2, "test": 2}),  # types in each split; three pairs each
        (dict.fromkeys("abcde", 6), {"val": 3, "test": 3}),
        ({"a": 80, "b": 10, "c": 5, "d": 5}, {"val": 4, "test": 4}),
        ({"a": 252, "b": 30, "c": 10, "d": 5, "e": 3}, {"val": 5, "test": 5}),
        ({"a": 180, **{f"rare{n}": 3 for n in range(40)}}, {"val": 16, "test": 16}),  # more types than room
    ],
)
def test_rare_change_types_are_in_val_and_test(
    tmp_path: Path, counts: dict[str, int], held_out: dict[str, int]
) -> None:
    kinds = [kind for kind, count in counts.items() for _ in range(count)]
    write_lines(tmp_path / "pairs.jsonl", [row(n, change_type=kind) for n, kind in enumerate(kinds)])
    pairs, found = read_pairs("desk", tmp_path), set()
    for split, types in held_out.items():
        of_type = Counter(pair.change_type for pair in pairs if pair.split == split)
        assert len(of_type) == types and of_type.total() == len(pairs) // 10
        assert of_type[max(counts, key=counts.__getitem__)] <= max(counts.values()) / 10 + 1
        found |= of_type.keys()
    assert found == counts.keys() or len(counts) > 5
    assert {pair.change_type for pair in pairs if pair.split == "train"} == counts.keys()


def test_without_change_types_the_drawn_splits_stay_those_of_earlier_versions(tmp_path: Path) -> None:
    write_lines(tmp_path / "pairs.jsonl", [row(n, is_distractor=n % 2 == 0) for n in range(30)])
    held_out = {pair.id: pair.split for pair in read_pairs("desk", tmp_path) if pair.split != "train"}
    assert held_out == {"11": "val", "18": "val", "25": "val", "0": "test", "13": "test", "24": "test"}


def test_pairs_with_another_split_than_before_are_counted_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def output(split: str) -> str:
        splits = [split, *["train"] * 9, *["val"] * 10, *["test"] * 10]
        write_lines(tmp_path / "pairs.jsonl", [row(n, split=each) for n, each in enumerate(splits)])
        prepare("desk", str(tmp_path), str(tmp_path / "out"), captions_only=True)
        return capsys.readouterr().out

    assert "another split" not in output("train")
    assert "warning: 1 pair has another split than in the earlier manifest" in output("test")
    assert "another split" not in output("test")


def notes_on(folder: Path) -> str:
    return "\n".join(describe("desk", read_pairs("desk", folder), folder)["notes"])


@pytest.mark.parametrize(
    ("key", "near"), [("distractor", "is_distractor"), ("masks", "mask"), ("type", "change_type"), ("Split", "split")]
)
def test_a_misspelt_key_is_named_with_the_known_one(tmp_path: Path, key: str, near: str) -> None:
    write_lines(tmp_path / "pairs.jsonl", [row(n, room=n, **({key: "x"} if n < 12 else {})) for n in range(100)])
    notes = notes_on(tmp_path)
    assert notes.count("warning") == 1 and '"room" (100 pairs)' in notes
    assert f'"{key}" (12 pairs; did you mean "{near}"?)' in notes
    whole = {"change_type": "drop", "is_distractor": False, "viewpoint_iou": 0.5, "boxes": None, "pixel_ranges": "x"}
    write_lines(tmp_path / "pairs.jsonl", [row(n, id=n, **whole) for n in range(30)])
    assert notes_on(tmp_path) == "" and not any("pixel_ranges" in pair.extra for pair in read_pairs("desk", tmp_path))


@pytest.mark.parametrize(
    ("counts", "warning"),
    [
        ((30, 10, 10), ""),
        ((30, 9, 12), "only 9 val pairs"),
        ((30, 3, 9), "only 3 val and 9 test pairs"),
        ((30, 10, 0), "no test pairs, so eval and report have nothing to score"),
        ((0, 0, 10), "no train pairs, so the dataset serves for evaluation only"),
    ],
)
def test_small_and_missing_splits_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], counts: tuple[int, int, int], warning: str
) -> None:
    splits = [split for split, count in zip(("train", "val", "test"), counts) for _ in range(count)]
    write_lines(tmp_path / "pairs.jsonl", [row(n, split=split) for n, split in enumerate(splits)])
    prepare("desk", str(tmp_path), str(tmp_path / "out"), captions_only=True)
    output = capsys.readouterr().out
    assert output.count("warning") == bool(warning) and warning in output


@pytest.mark.parametrize("form", ["pairs.jsonl", "captions.json"])
def test_training_pairs_without_val_pairs_are_refused_before_the_extraction(tmp_path: Path, form: str) -> None:
    rows = [row(1, split="train"), row(2, split="val", captions=[]), row(3, split="test")]
    if form == "pairs.jsonl":
        write_lines(tmp_path / form, rows)
    else:
        entry = {"split": "train", "sentences": [{"raw": "a cup is gone"}]}
        write_json(tmp_path / form, {"images": [{**entry, "filename": f"{n}.jpg"} for n in (1, 2)]})
    for side in "abAB":
        for n in (1, 2, 3):
            write_image(tmp_path / side / f"{n}.jpg")
    with pytest.raises(DiffcapError, match=r'has train pairs and no val pairs with captions.*"val"'):
        prepare("desk", str(tmp_path), str(tmp_path / "out"), check="exists")
    assert not (tmp_path / "out/manifest.jsonl").exists()
    prepare("desk", str(tmp_path), str(tmp_path / "out"), captions_only=True)  # for the negatives


def test_the_csv_table_of_the_command_caption_is_read(tmp_path: Path) -> None:
    (tmp_path / "pairs.csv").write_text(
        "id,Before,after,caption,split,is_distractor,viewpoint_iou,boxes,room\n"
        'one,a/1.jpg,b/1.jpg,"the cup, it is gone",train,,0.5,"{""before"": [0, 1, 2, 3]}",hall\n'
        "two,a/2.jpg,b/2.jpg,nothing has changed,val,True,,,\n"
        "three,a/3.jpg,b/3.jpg,,test,0,,,\n"
    )
    extra = {"viewpoint_iou": 0.5, "boxes": {"before": [0, 1, 2, 3]}, "room": "hall"}
    assert read_pairs("desk", tmp_path) == [
        ChangePair("one", "a/1.jpg", "b/1.jpg", ["the cup, it is gone"], "train", None, False, extra),
        ChangePair("two", "a/2.jpg", "b/2.jpg", ["nothing has changed"], "val", None, True),
        ChangePair("three", "a/3.jpg", "b/3.jpg", [], "test"),
    ]
    assert [pair.id for pair in find_pairs(str(tmp_path))[0]] == ["one", "two", "three"]
    (tmp_path / "pairs.csv").write_text("before,after,is_distractor\na.jpg,b.jpg,maybe\n")
    assert 'line 2: "is_distractor" must be true or false' in refusal("desk", tmp_path)


@pytest.mark.parametrize(
    ("bad", "output"),
    [
        (row(2, before=None), '"before" must be the path of an image, found None'),
        (row(2, before="http://example.org/a.png"), "http://example.org/a.png is a URL; download the image"),
        (row(2, after="/data/b.jpg"), "the path '/data/b.jpg' leads out of the dataset's folder; write it relative"),
        (row(2, before="./..//b.jpg"), "the path './..//b.jpg' leads out of the dataset's folder; write it relative"),
        ({"before": "c.jpg", "after": "d.jpg", "caption": "one"}, '"captions" is missing, and "caption" is not'),
        (row(2, captions=["x", "\u200b\ufeff"], split="val"), "a blank caption; write its text or remove it"),
        (row(2, id="1", split="val"), "the id '1' is also in "),
        (row(2, captions="one"), "\"captions\" must be a list of sentences, found 'one'"),
        (row(2, id=" \u200b"), '"id" must be a string'),
        (row(2, split="dev"), "\"split\" must be one of train, val, test, found 'dev'"),
        (row(2, is_distractor=1), '"is_distractor" must be true or false'),
        (row(2, split="val", change_type="total"), "\"change_type\" is 'total', which is a reserved name"),
        (row(2), 'no "split", while other lines have one'),
        (row(2, id=float("nan")), "NaN, which is not a finite number"),
        (row(2, id=["1"]), "\"id\" must be a string, found ['1']"),
        (row(2, split="val", changed="the cup"), '"changed" is a key of the rendered dataset'),
        (row(2, split="val", changeflag=0), '"changeflag" is not a key of this format; write "is_distractor"'),
        (row(2, split="val", mask=3), '"mask" must be the path of an image, found 3'),
        (row(2, split="val", mask="../m.png"), "leads out of the dataset's folder"),
        (row(2, split="val", viewpoint_iou="high"), "\"viewpoint_iou\" must be a number, found 'high'"),
        (row(2, split="val", boxes=[[0, 0, 5, 5]]), '"boxes" must be {"before": [x0, y0, x1, y1] or null, "after"'),
    ],
)
def test_a_malformed_line_is_named_by_number(tmp_path: Path, bad: dict[str, object], output: str) -> None:
    write_lines(tmp_path / "pairs.jsonl", [row(1, split="train"), bad])
    assert f"{tmp_path / 'pairs.jsonl'}, line 2: " in refusal("desk", tmp_path) and output in refusal("desk", tmp_path)
