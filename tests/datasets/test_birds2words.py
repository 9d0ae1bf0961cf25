from pathlib import Path

import pytest
from tests.datasets.layouts import BIRD_COLUMNS, bird_row, refusal, write_image, write_lines

from diffcap.datasets import read_pairs
from diffcap.datasets.birds2words import photo_id, tokenised
from diffcap.records import ChangePair

ROWS = [
    bird_row("11", "12", "train", 'Animal 1 has a "puffy" tail.', 1),
    bird_row("13", "11", "dev", "Animal 2's beak is multi-colored"),
    bird_row("11", "12", "train", "Animal 2 is brown, animal 1 is not", 2),
    bird_row("12", "11", "test", "they are the same"),
]


def write_table(folder: Path, rows: list[str], name: str = "birds-to-words-v1.0.tsv") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("\n".join(rows) + "\n")


def check_pairs(pairs: list[ChangePair]) -> None:
    assert [(pair.id, pair.split) for pair in pairs] == [("11_12", "train"), ("13_11", "val"), ("12_11", "test")]
    assert pairs[0].captions == ["animal1 has a `` puffy `` tail .", "animal2 is brown , animal1 is not"]
    assert pairs[1].captions == ["animal2 ' s beak is multi - colored"]
    assert (pairs[0].before, pairs[0].after) == ("images/11.jpg", "images/12.jpg")


@pytest.mark.parametrize("ending", ["", "\r"])
@pytest.mark.parametrize("header", [True, False])
def test_rows_of_the_table_with_the_same_two_photos_are_one_pair(tmp_path: Path, header: bool, ending: str) -> None:
    write_table(tmp_path, [row + ending for row in (["\t".join(BIRD_COLUMNS)] if header else []) + ROWS])
    pairs = read_pairs("birds2words", tmp_path)
    check_pairs(pairs)
    assert pairs[0].extra == {"species": ["Turdus merula", "Turdus pilaris"], "selection": ["base", "sameGenus"]}


def test_columns_follow_the_header(tmp_path: Path) -> None:
    rows = ["\t".join(reversed(row.split("\t"))) for row in ["\t".join(BIRD_COLUMNS), *ROWS]]
    write_table(tmp_path, rows)
    check_pairs(read_pairs("birds2words", tmp_path))


def test_quotes_of_a_spreadsheet_are_undone(tmp_path: Path) -> None:
    write_table(
        tmp_path, [bird_row("1", "2", "train", '"a ""red"" tail"'), bird_row("1", "2", "train", 'a "red" tail')]
    )
    assert read_pairs("birds2words", tmp_path)[0].captions == ["a `` red `` tail"] * 2


def test_tokenised_lines(tmp_path: Path) -> None:
    first = {"img1": "11", "img2": "12", "description": ["animal1", "has", "a", "``", "puffy", "``", "tail", "."]}
    second = {"img1": "11", "img2": "12", "description": ["animal2", "is", "brown", ",", "animal1", "is", "not"]}
    val = {"img1": "13", "img2": "11", "description": [["animal2", "'", "s", "beak", "is", "multi", "-", "colored"]]}
    test = {"img1": "12", "img2": "11", "description": [["one"], ["two", "words"]], "annN": "1"}
    write_lines(tmp_path / "train.jsonl", [first, second])
    write_lines(tmp_path / "dev.jsonl", [val])
    write_lines(tmp_path / "test.jsonl", [test])
    pairs = read_pairs("birds2words", tmp_path)
    check_pairs(pairs)
    assert pairs[2].captions == ["one", "two words"]


def test_photos_are_found_by_id_whatever_their_extension(tmp_path: Path) -> None:
    write_table(tmp_path, ROWS)
    for name in ("11.png", "12.JPG", "13.jpeg", "13.jpg"):
        write_image(tmp_path / "scratch.png")
        (tmp_path / "images").mkdir(exist_ok=True)
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


def test_text_is_spelled_as_in_the_tokenised_form() -> None:
    assert tokenised("Animal 1 is red; Animal 2's (back) isn't!") == "animal1 is red ; animal2 ' s ( back ) isn ' t !"


@pytest.mark.parametrize(
    ("row", "output"),
    [
        ("a\tb", "2 columns, not 11"),
        (bird_row("1", "2", "training", "x"), 'found "training"'),
        (bird_row("1", "2", "train", " "), "the column description is empty"),
        (bird_row("11", "12", "test", "x"), "11_12 is in test here and in train before"),
    ],
)
def test_a_malformed_row_is_named_by_number(tmp_path: Path, row: str, output: str) -> None:
    write_table(tmp_path, [*ROWS, row])
    assert f"{tmp_path / 'birds-to-words-v1.0.tsv'}, line 5: " in refusal(
        "birds2words", tmp_path
    ) and output in refusal("birds2words", tmp_path)


@pytest.mark.parametrize("description", [[], "a bird", [[]], [["a"], "b"], None, [1]])
def test_a_malformed_line_is_named_by_number(tmp_path: Path, description: object) -> None:
    good = {"img1": "1", "img2": "2", "description": ["a"]}
    write_lines(tmp_path / "train.jsonl", [good, {**good, "description": description}])
    assert f'{tmp_path / "train.jsonl"}, line 2: "description" must be' in refusal("birds2words", tmp_path)


def test_the_authors_files_may_end_in_json(tmp_path: Path) -> None:
    for split in ("train", "val", "test"):
        write_lines(tmp_path / f"{split}.json", [{"img1": f"1{split}", "img2": "2", "description": ["a", "bird"]}])
    assert [pair.captions for pair in read_pairs("birds2words", tmp_path)] == [["a bird"]] * 3


def test_one_form_and_all_of_it(tmp_path: Path) -> None:
    assert "put the official birds-to-words-v1.0.tsv or train.jsonl" in refusal("birds2words", tmp_path)
    write_lines(tmp_path / "train.jsonl", [{"img1": "1", "img2": "2", "description": ["a"]}])
    assert f"{tmp_path / 'val.jsonl'}: no annotations there" in refusal("birds2words", tmp_path)
    write_table(tmp_path, ROWS)
    assert "keep only one format" in refusal("birds2words", tmp_path)


def test_a_header_with_other_columns_is_refused(tmp_path: Path) -> None:
    write_table(tmp_path, ["img1ImgURL\timg2ImgURL\tdescription", *ROWS])
    assert "line 1: the columns must be img1ObservationURL" in refusal("birds2words", tmp_path)
