"""Spot-the-Diff, Image-Editing-Request and Birds-to-Words."""

from pathlib import Path
from typing import Any

import pytest
from tests.datasets import layouts

from diffcap.datasets import describe, read_pairs
from diffcap.datasets.photos import photo_id, tokenize_text
from diffcap.evaluation.coco import read_references, write_references
from diffcap.records import ChangePair, take_changes, with_words
from diffcap.text.vocabulary import build_vocabulary


def test_rows_of_one_pair_are_merged(tmp_path: Path) -> None:
    folder = layouts.write_spot_the_diff(tmp_path)
    pairs = {pair.id: pair for pair in read_pairs("spot_the_diff", folder)}
    first = pairs["7.png"]
    assert first.captions == ["the red car has moved", "a man is gone", "the car left"]
    assert (first.before, first.after, first.split) == ("resized_images/7.png", "resized_images/7_2.png", "train")
    assert first.extra == {"annotators": [2, 1]}
    assert [pair.id for pair in pairs.values() if pair.split == "test"] == ["5.png", "6.png"]
    assert all((folder / path).is_file() for pair in pairs.values() for path in pair.images)
    assert pairs["6.png"].captions == [""]  # kept: the released files score this pair
    assert with_words([*pairs.values()]) == [pair for pair in pairs.values() if pair.id != "6.png"]
    output = describe("spot_the_diff", list(pairs.values()), folder)
    assert output["notes"] == ["annotators' rows, merged by pair: train 9, val 2, test 2"]
    assert output["changes"] == "single" and output["repetitions"]["blank_captions"] == 1


@pytest.mark.parametrize("place", ["annotations", "data/annotations", ""])
def test_annotations_and_images_may_lie_in_other_places(tmp_path: Path, place: str) -> None:
    folder = layouts.write_spot_the_diff(tmp_path)
    (folder / place).mkdir(parents=True, exist_ok=True)
    for path in list((folder / "annotations").iterdir()):
        path.rename(folder / place / path.name)
    (folder / "resized_images").rename(folder / "images")
    assert read_pairs("spot_the_diff", folder)[0].after == "images/7_2.png"
    for path in list((folder / "images").iterdir()):
        path.rename(folder / path.name)
    assert read_pairs("spot_the_diff", folder)[0].after == "7_2.png"


def test_one_protocol_takes_sentences_and_the_other_pairs(tmp_path: Path) -> None:
    pairs = read_pairs("spot_the_diff", layouts.write_spot_the_diff(tmp_path, images=False))
    assert take_changes(pairs, "single") == take_changes(pairs, None) == pairs
    joined = {pair.id: pair.captions for pair in take_changes(pairs, "multi")}
    assert joined["7.png"] == ["the red car has moved. a man is gone. the car left"]
    assert joined["6.png"] == [""]
    assert pairs[0].captions == ["the red car has moved", "a man is gone", "the car left"]
    train = [caption for pair in pairs if pair.split == "train" for caption in pair.captions]
    texts = [". ".join(pair.captions) for pair in pairs if pair.split == "train"]
    assert build_vocabulary(train, 1, "rcc").words == build_vocabulary(texts, 1, "rcc").words  # full stops go
    pairs[0].captions[:] = [" ".join(f"{letter}{n}" for n in range(40)) for letter in "ab"]
    words = take_changes(pairs, "multi")[0].captions[0].split(" ")  # all changes of a pair end behind the sixtieth word
    assert len(words) == 60 and words[39:41] == ["a39.", "b0"] and words[-1] == "b19"


def test_pairs_are_known_by_uid_and_images_may_be_shared(tmp_path: Path) -> None:
    folder = layouts.write_image_editing_request(tmp_path)
    pairs = {pair.id: pair for pair in read_pairs("image_editing_request", folder)}
    assert list(pairs)[:2] == ["Z_1", "Z_2"] and pairs["R_1"].split == "val"
    assert (pairs["Z_1"].before, pairs["Z_1"].after) == (pairs["Z_2"].before, pairs["Z_2"].after)
    assert pairs["Z_1"].captions == ["Making dark color "]  # as it was typed
    assert all((folder / path).is_file() for pair in pairs.values() for path in pair.images)
    output = describe("image_editing_request", list(pairs.values()), folder)
    assert output["repetitions"]["image_pairs"]["train"] == 7  # of 8 uids
    assert output["repetitions"]["image_pairs_in_two_splits"] == 1
    references = {id: pair.captions for id, pair in pairs.items() if pair.split == "test"}
    write_references(tmp_path / "references.json", references)
    assert read_references(tmp_path / "references.json") == references  # uids pass through COCO's form
    (folder / "valid.json").rename(folder / "val.json")
    for path in list((folder / "images").iterdir()):
        path.rename(folder / path.name)
    (folder / "images").rmdir()
    assert read_pairs("image_editing_request", folder)[0].before == "0.jpg"


@pytest.mark.parametrize(
    ("dataset", "rows", "words"),
    [
        ("spot_the_diff", [{"img_id": "7", "sentences": ["x"]}], "7.png is in test here and in train before"),
        ("spot_the_diff", [{"img_id": 7, "sentences": ["x"]}], "test.json, entry 1: "),
        ("spot_the_diff", [{"img_id": "8", "sentences": [3]}], "test.json, entry 1: "),
        ("spot_the_diff", [{"img_id": "9", "sentences": ["x"]}, 4], "test.json, entry 2: "),
        ("image_editing_request", [{"uid": "Z_1"}], "id 'Z_1' is duplicated (in train and test)"),
        ("image_editing_request", [{"uid": ""}], "test.json, entry 1: "),
        ("image_editing_request", [{"img1": None}], "test.json, entry 1: "),
        ("image_editing_request", [{"sents": "x"}], "test.json, entry 1: "),
        ("image_editing_request", {}, "expected a list of annotations, found dict"),
        ("image_editing_request", None, "no annotations there; put train.json"),
    ],
)
def test_a_malformed_entry_is_named_by_number(tmp_path: Path, dataset: str, rows: Any, words: str) -> None:
    if dataset == "spot_the_diff":
        path = layouts.write_spot_the_diff(tmp_path, images=False) / "annotations/test.json"
    else:
        path = layouts.write_image_editing_request(tmp_path) / "test.json"
        good = {"img0": "a.jpg", "img1": "b.jpg", "sents": ["x"], "uid": "R_9"}
        rows = [{**good, **row} for row in rows] if isinstance(rows, list) else rows
    path.unlink()
    if rows is not None:
        layouts.write_json(path, rows)
    assert words in layouts.refusal(dataset, tmp_path)


ROWS = [
    layouts.bird_row("11", "12", "train", 'Animal 1 has a "puffy" tail.', 1),
    layouts.bird_row("13", "11", "dev", "Animal 2's beak is multi-colored"),
    layouts.bird_row("11", "12", "train", "Animal 2 is brown, animal 1 is not", 2),
    layouts.bird_row("12", "11", "test", "they are the same"),
]


def write_table(folder: Path, rows: list[str]) -> Path:
    path = folder / "birds-to-words-v1.0.tsv"
    path.write_text("\n".join(rows) + "\n")
    return path


def check_birds(folder: Path) -> list[ChangePair]:
    pairs = read_pairs("birds2words", folder)
    assert [(pair.id, pair.split) for pair in pairs] == [("11_12", "train"), ("13_11", "val"), ("12_11", "test")]
    assert pairs[0].captions == ["animal1 has a `` puffy `` tail .", "animal2 is brown , animal1 is not"]
    assert pairs[1].captions == ["animal2 ' s beak is multi - colored"]
    assert (pairs[0].before, pairs[0].after) == ("images/11.jpg", "images/12.jpg")
    return pairs


@pytest.mark.parametrize("ending", ["", "\r"])
@pytest.mark.parametrize("header", ["", "\t".join(layouts.BIRD_COLUMNS), "\t".join(reversed(layouts.BIRD_COLUMNS))])
def test_rows_of_the_table_with_the_same_two_photos_are_one_pair(tmp_path: Path, header: str, ending: str) -> None:
    is_reversed = header.startswith("description")  # columns follow the header
    rows = ["\t".join(row.split("\t")[:: -1 if is_reversed else 1]) for row in ROWS]
    write_table(tmp_path, [row + ending for row in ([header] if header else []) + rows])
    first = check_birds(tmp_path)[0]
    assert first.extra == {"species": ["Turdus merula", "Turdus pilaris"], "selection": ["base", "sameGenus"]}


def test_tokenised_lines(tmp_path: Path) -> None:
    first = {"img1": "11", "img2": "12", "description": ["animal1", "has", "a", "``", "puffy", "``", "tail", "."]}
    second = {"img1": "11", "img2": "12", "description": ["animal2", "is", "brown", ",", "animal1", "is", "not"]}
    val = {"img1": "13", "img2": "11", "description": [["animal2", "'", "s", "beak", "is", "multi", "-", "colored"]]}
    test = {"img1": "12", "img2": "11", "description": [["one"], ["two", "words"]], "annN": "1"}
    for names in (("train.jsonl", "dev.jsonl", "test.jsonl"), ("train.json", "val.json", "test.json")):
        for name, rows in zip(names, ([first, second], [val], [test])):
            layouts.write_lines(tmp_path / name, rows)
        assert check_birds(tmp_path)[2].captions == ["one", "two words"]
        for name in names:
            (tmp_path / name).unlink()


def test_photos_are_found_by_id_whatever_their_extension(tmp_path: Path) -> None:
    write_table(tmp_path, ROWS)
    (tmp_path / "images").mkdir()
    for name in ("11.png", "12.JPG", "13.jpeg", "13.jpg"):
        layouts.write_image(tmp_path / "scratch.png")
        (tmp_path / "scratch.png").rename(tmp_path / "images" / name)
    pairs = read_pairs("birds2words", tmp_path)
    assert (pairs[0].before, pairs[0].after) == ("images/11.png", "images/12.JPG")
    assert pairs[1].before == "images/13.jpg"


@pytest.mark.parametrize(
    ("image", "observation", "name"),
    [
        ("https://www.inaturalist.org/photos/647514", "", "647514"),
        ("https://static.inaturalist.org/photos/647514/large.jpg?1412", "", "647514"),
        ("https://example.org/birds/robin.jpeg?x=1", "https://www.inaturalist.org/photos/5", "5"),
        ("https://example.org/birds/robin.jpeg?x=1", "https://www.inaturalist.org/observations/5", "robin"),
        ("http://[half/robin.jpg?x=1/2", "", "robin"),
    ],
)
def test_names_of_photos(image: str, observation: str, name: str) -> None:
    assert photo_id(image, observation) == name


def test_text_is_spelled_as_in_the_tokenised_form(tmp_path: Path) -> None:
    assert tokenize_text("Animal 1 is red; Animal 2's (leg) isn't!") == "animal1 is red ; animal2 ' s ( leg ) isn ' t !"
    quoted = [
        layouts.bird_row("1", "2", "train", text) for text in ('"a ""red"" tail"', 'a "red" tail')
    ]  # by a spreadsheet
    write_table(tmp_path, quoted)
    assert read_pairs("birds2words", tmp_path)[0].captions == ["a `` red `` tail"] * 2


@pytest.mark.parametrize(
    ("row", "output"),
    [
        ("a\tb", "2 columns, not 11"),
        (layouts.bird_row("1", "2", "training", "x"), 'found "training"'),
        (layouts.bird_row("1", "2", "train", " "), "the column description is empty"),
        (layouts.bird_row("11", "12", "test", "x"), "11_12 is in test here and in train before"),
    ],
)
def test_a_malformed_row_is_named_by_number(tmp_path: Path, row: str, output: str) -> None:
    path = write_table(tmp_path, [*ROWS, row])
    found = layouts.refusal("birds2words", tmp_path)
    assert f"{path}, line 5: " in found and output in found
    write_table(tmp_path, ["img1ImgURL\timg2ImgURL\tdescription", *ROWS])
    assert "line 1: the columns must be img1ObservationURL" in layouts.refusal("birds2words", tmp_path)


@pytest.mark.parametrize("description", [[], "a bird", [[]], [["a"], "b"], None, [1]])
def test_a_malformed_line_is_named_by_number(tmp_path: Path, description: object) -> None:
    good = {"img1": "1", "img2": "2", "description": ["a"]}
    layouts.write_lines(tmp_path / "train.jsonl", [good, {**good, "description": description}])
    assert f'{tmp_path / "train.jsonl"}, line 2: "description" must be' in layouts.refusal("birds2words", tmp_path)


def test_one_form_and_all_of_it(tmp_path: Path) -> None:
    assert "put the official birds-to-words-v1.0.tsv or train.jsonl" in layouts.refusal("birds2words", tmp_path)
    layouts.write_lines(tmp_path / "train.jsonl", [{"img1": "1", "img2": "2", "description": ["a"]}])
    assert f"{tmp_path / 'val.jsonl'}: no annotations there" in layouts.refusal("birds2words", tmp_path)
    write_table(tmp_path, ROWS)
    assert "keep only one format" in layouts.refusal("birds2words", tmp_path)


@pytest.mark.parametrize("name", ["../../etc/x", "a/../../../x", "/etc/x"])
def test_no_path_leads_out_of_the_folder(tmp_path: Path, name: str) -> None:
    """Of spot_the_diff; every reader's paths are checked in the same place."""
    folder = layouts.write_spot_the_diff(tmp_path, images=False)
    (folder / "1_2.png").touch()  # the images lie beside the annotations
    layouts.write_json(folder / "annotations/val.json", [{"img_id": name, "sentences": ["x"]}])
    words = f"{folder}, the pair '{name}.png': the path '{name}.png' leads out of the dataset's folder"
    assert words in layouts.refusal("spot_the_diff", folder)
