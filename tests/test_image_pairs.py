"""The image pairs that a command line names: folders and tables."""

import unicodedata
from pathlib import Path

import pytest

from diffcap.commands.pairs import ImagePair, find_pairs
from diffcap.utils.errors import DiffcapError


def test_pairs_of_folders(tmp_path: Path) -> None:
    for name in ("a_before.png", "a_after.jpg", "b_before.png", "c.png", "c_2.png", "notes.txt"):
        (tmp_path / name).write_bytes(b"")
    folder = str(tmp_path)
    pairs, notes = find_pairs(folder)
    assert pairs == [ImagePair("a", tmp_path / "a_before.png", tmp_path / "a_after.jpg")]
    left = ", ".join(str(tmp_path / name) for name in ("b_before.png", "c.png", "c_2.png"))
    assert notes == [f"3 unpaired images were ignored: {left}."]
    (tmp_path / "a_after.png").write_bytes(b"")
    with pytest.raises(DiffcapError, match=r"a_after\.jpg and a_after\.png: both belong to the pair a"):
        find_pairs(folder)
    (tmp_path / "a_before.png").unlink()
    assert find_pairs(folder)[0] == [ImagePair("c", tmp_path / "c.png", tmp_path / "c_2.png")]
    (tmp_path / "c.png").unlink()
    with pytest.raises(DiffcapError, match="no pairs found"):
        find_pairs(folder)
    (tmp_path / "pairs.tsv").write_text("after\tbefore\n2.png\t1.png\n")
    assert find_pairs(folder) == ([ImagePair("1", tmp_path / "1.png", tmp_path / "2.png")], [])
    (tmp_path / "bare.csv").write_text("1.png,2.png\n3.png,4.png\n")
    assert [pair.after.name for pair in find_pairs(str(tmp_path / "bare.csv"))[0]] == ["2.png", "4.png"]
    for number, sides in enumerate([("A", "B"), ("before", "after"), ("images", "sc_images")]):
        files = [tmp_path / str(number) / side / "1.png" for side in sides]
        for file in files:
            file.parent.mkdir(parents=True)
            file.touch()
        assert find_pairs(str(tmp_path / str(number))) == ([ImagePair("1", *files)], [])


def test_names_in_another_unicode_normal_form_match(tmp_path: Path) -> None:
    composed = "Stra\u00dfe M\u00fcnchen"
    decomposed = unicodedata.normalize("NFD", composed)
    files = [tmp_path / "before" / f"{composed}.png", tmp_path / "after" / f"{decomposed}.png"]
    for file in files:
        file.parent.mkdir()
        file.touch()
    assert find_pairs(str(tmp_path)) == ([ImagePair(composed, *files)], [])
    (tmp_path / "pairs.csv").write_text(f"before,after\nbefore/{decomposed}.png,after/{composed}.png\n", "utf-8")
    ((pair,), _) = find_pairs(str(tmp_path))
    assert [pair.before, pair.after] == files


@pytest.mark.parametrize("ids", [("0", "1"), ("0", "0.0", "false"), ("null", "2", '""')])
def test_tables_may_be_numbered_from_0(tmp_path: Path, ids: tuple[str, ...]) -> None:
    rows = [f'{{"id": {id}, "before": "a.png", "after": "b.png"}}\n' for id in ids]
    (tmp_path / "pairs.jsonl").write_text("".join(rows))
    expected = {"null": "000001", '""': "000003", "false": "False"}
    assert [pair.id for pair in find_pairs(str(tmp_path))[0]] == [expected.get(id, id) for id in ids]


def test_images_of_folders_are_in_natural_order_and_unpaired_ones_are_named(tmp_path: Path) -> None:
    names = ["2", "10", "a01b", "a1b", "a2", "a10", "b"]
    for side, more in (("before", [str(number) for number in range(11, 17)]), ("after", ["9"])):
        (tmp_path / side).mkdir()
        for name in [*names, *more]:
            (tmp_path / side / f"{name}.png").touch()
    pairs, (note,) = find_pairs(str(tmp_path))
    assert [pair.id for pair in pairs] == names
    named = ", ".join(str(tmp_path / f"before/{number}.png") for number in (11, 12, 13))
    assert note == f"7 unpaired images were ignored: {named} and 4 more."
    assert find_pairs(str(tmp_path / "before"), str(tmp_path / "after"))[0] == pairs


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("before,before,after\na,b,c\n", 'line 1: 2 columns are named "before"; keep one of them.'),
        ("before,after,ID,id\na,b,1,2\n", 'line 1: 2 columns are named "id"'),
        ("before,after\na,b\nc, d,e.png\n", "line 3: 3 cells for 2 columns; put quotes around a path with a comma"),
        ("before,after\na\0,b\n", "contains a NUL character"),
        ('before,after\n"a,b\nc,d\n', "not a CSV table (unexpected end of data)"),
        (f"before,after\na,{200_000 * 'b'}\n", "not a CSV table (field larger than field limit"),
        ('before,after\n"a\nb",c\n\u200b,d\n', 'line 4: "before" is missing'),
        ("before,after\n\xe9,b\n", "not a table of UTF-8 text"),
        ("id,before,after\nx,a,b\ny,a,c\nx,c,d\n", 'line 4: the id "x" is duplicated; give each pair a unique "id"'),
        ("id,before,after\n2,a,b\n3,b,c\n,3.png,d\n", 'line 4: the id "3" is duplicated'),
        ('{"before": "a", "after": "b", "id": NaN}\n', "line 1: not usable JSON (it contains NaN"),
        ('{"before": "a", "after": "b", "id": ["x"]}\n', "line 1: \"id\" is ['x']; give a string or a number."),
        ('{"before": ["a"], "after": "b"}\n', 'line 1: "before" is missing'),
    ],
)
def test_a_malformed_table_is_one_sentence(tmp_path: Path, text: str, reason: str) -> None:
    table = tmp_path / ("a.jsonl" if text.startswith("{") else "a.csv")
    table.write_bytes(text.encode("latin1" if "\xe9" in text else "utf-8"))
    with pytest.raises(DiffcapError) as error:
        find_pairs(str(table))
    assert str(error.value).startswith(str(table)) and reason in str(error.value)


def test_cells_of_a_table(tmp_path: Path) -> None:
    table = tmp_path / "a.csv"
    table.write_bytes(
        b'\xef\xbb\xbfbefore,after,id,,\r"x\n1.png","2,3.png", \xe2\x80\x8b,,\r\r\n4.png,5\xc2\x85.png,y,,\n'
    )
    assert find_pairs(str(table))[0] == [
        ImagePair("x\n1", tmp_path / "x\n1.png", tmp_path / "2,3.png"),
        ImagePair("y", tmp_path / "4.png", tmp_path / "5\x85.png"),
    ]
