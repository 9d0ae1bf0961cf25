"""The results table as text, and the notes to it."""

import re
from collections.abc import Sequence
from html import escape as html_escape
from typing import Any

import pytest
from markdown_it import MarkdownIt
from rich.console import Console

from diffcap.report.table import (
    footnotes,
    group_table,
    localisation_note,
    localisation_table,
    localisation_tabs,
    protocol_text,
    report_text,
    score_tabs,
    system_table,
    type_table,
    type_tabs,
    word_id_note,
    word_id_rows,
    zero_shot_text,
)
from diffcap.utils.table import Cell, Table

ID_TOKENS = {"name": "levir_cc", "vocabulary": "the captioner's own", "vocabulary_size": 468}
SCORES = {"BLEU-4": 0.5, "CIDEr-D": 1.25}
PROTOCOL = {"dataset": "toy", "split": "test", "tokenizer": "ptb", "beams": 1, "pairs": {"total": 1234}}
ROWS = {
    "base": {"total": SCORES, "seconds": None},
    "ours": {
        "total": SCORES,
        "distractor": {"CIDEr-D": 0.1},
        "move": {"CIDEr-D": 0.75},
        "color": {"CIDEr-D": 0.5},
        "zoom": {"CIDEr-D": 0.25},
        "change_probability": {"AUC": 0.875, "accuracy": 0.5},
        "type_accuracy": {"move": 0.5, "color": 1.0, "zoom": 0.0, "distractor": 0.75},
        "seconds": 1234.4,
        "std": {"total": {"BLEU-4": 0.01}, "seconds": 5.6},
        "runs": 3,
    },
}


def lines(table: Table | None) -> list[list[str]]:
    assert table is not None
    return table.lines()


def test_systems_by_scores_by_change_type_and_by_group() -> None:
    assert system_table(ROWS).lines() == [
        ["", "BLEU-4", "CIDEr-D", "CIDEr-D distractor", "change AUC", "training seconds"],
        ["base", "50.00", "125.00", "-", "-", "-"],
        ["ours", "50.00 ± 1.00", "125.00", "10.00", "87.50", "1,234 ± 6"],
    ]
    assert lines(type_table({"ours": ROWS["ours"]})) == [
        ["", "", "color", "move", "zoom", "distractor"],
        ["ours", "CIDEr-D", "50.00", "75.00", "25.00", "10.00"],
        ["", "type right", "100.00", "50.00", "0.00", "75.00"],
    ]
    assert lines(group_table(ROWS)) == [
        ["", "", "BLEU-4", "CIDEr-D"],
        ["total", "base", "50.00", "125.00"],
        ["", "ours", "50.00 ± 1.00", "125.00"],
        ["distractor", "base", "-", "-"],
        ["", "ours", "-", "10.00"],
    ]
    assert type_table({"base": ROWS["base"]}) is None and group_table({"base": ROWS["base"]}) is None
    flags = {"a": {"total": SCORES, "change": SCORES, "no_change": {"CIDEr-D": 0.1}}}
    assert [line[0] for line in lines(group_table(flags))] == ["", "total", "change", "no_change"]
    assert system_table(flags).columns[-2:] == ["CIDEr-D change", "CIDEr-D no change"] and type_table(flags) is None


def test_the_protocol_levir_cc_has_a_table_of_word_ids() -> None:
    by_ids = {"total": {"BLEU-4": 0.25, "S*m": 0.5, "accuracy": 0.75}, "no_change": {"BLEU-4": 1.0, "accuracy": 0.875}}
    text = {"total": {**SCORES, "S*m": 0.5}, "built": {"CIDEr-D": 0.5}, "no_change": {"CIDEr-D": 0.0}}
    ours = {**text, "id_tokens": by_ids, "std": {"id_tokens": {"total": {"BLEU-4": 0.01}}}}
    rows = {"base": ROWS["base"], "ours": ours}
    assert list(word_id_rows(rows)) == ["ours"] and word_id_rows(ROWS) == {}
    assert lines(group_table(word_id_rows(rows))) == [
        ["", "", "BLEU-4", "S*m", "accuracy"],
        ["total", "ours", "25.00 ± 1.00", "50.00", "75.00"],
        ["no_change", "ours", "100.00", "-", "87.50"],
    ]
    assert lines(type_table(rows))[0] == ["", "", "built", "no_change"]  # the ids are no change type
    note = "Protocol levir_cc: scores of word ids. Vocabulary: 468 ids, the captioner's own. METEOR depends on the vocabulary."
    protocol = {**PROTOCOL, "id_tokens": {"ours": ID_TOKENS}}
    assert f"{note}\n\n|  |  | BLEU-4 | S*m | accuracy |" in report_text(protocol, rows, ["ours"])
    both = word_id_note({"a": ID_TOKENS, "b": {**ID_TOKENS, "vocabulary_size": 9}, "c": ID_TOKENS})
    assert "a / c: 468 ids, the captioner's own; b: 9 ids" in both


def test_localisation_is_a_table_with_its_chance() -> None:
    row = {"count": 1200, "pointing": 0.5, "pointing_chance": 0.25, "mass": 0.125, "mass_chance": 0.03}
    tables = {"kinds": {"all words": row, "color": row}, "words": {}}
    found = {"a": {"region": "mask", **tables, "boxes": tables}, "b": {"region": "box", **tables}}
    _, *rows = localisation_table(found).lines()
    assert rows[0] == ["a", "mask", "1,200", "50.0", "25.0", "12.5", "3.0"]
    assert [line[:2] for line in rows] == [["a", "mask"], ["a", "box"], ["b", "box"]]
    covered = localisation_note({"pairs": 3, "empty": 0, "unreadable": 0, "share": 0.5})
    assert covered.endswith(" Masks of 3 pairs; they cover 50.0 % of the image on average.")
    assert localisation_note({"pairs": 0, "empty": 0, "unreadable": 2}).endswith("pairs. Left out: 2 unreadable masks.")
    tabs = localisation_tabs(found)
    assert {tab: list(tables) for tab, tables in tabs.items()} == {
        "by kind of word": ["a", "b"],
        "by word": ["a", "b"],
        "boxes, by kind of word": ["a"],
        "boxes, by word": ["a"],
    }
    assert [tables["a"].columns[2] for tables in tabs.values()] == 2 * ["mass in the mask, %"] + 2 * [
        "mass in the box, %"
    ]
    by_kind = tabs["by kind of word"]["b"]
    assert by_kind.lines()[1:] == [["all words", "1,200", "50.0", "12.5"], ["color", "1,200", "50.0", "12.5"]]
    assert '<td style="--v:0.5;--w:0.25">50.0<small> 25.0</small></td>' in by_kind.html("where", {})
    text = report_text(PROTOCOL, ROWS, ["ours"], found, None)
    assert text.startswith(report_text(PROTOCOL, ROWS, ["ours"]).rstrip()) and "| a | mask | 1,200 |" in text


@pytest.mark.parametrize(
    ("changes", "rows", "found"),
    [
        ({}, ROWS, "toy, test split, 1,234 pairs, ptb tokens, greedy decoding; scores x 100; mean ± standard deviation over 3 runs."),
        (
            {"official": "part", "change_types": "guessed", "remark": "Left out: a row."},
            {},
            "toy, test split, a part of the official dataset, change types guessed, 1,234 pairs, ptb tokens, greedy decoding; "
            "scores x 100. Left out: a row.",
        ),
        ({}, {**ROWS, "others": {**ROWS["ours"], "runs": 5}}, "standard deviation over 3 to 5 runs."),
        ({"beams": 5, "length_penalty": 0.7}, {}, "beam search of 5, length penalty 0.7; scores"),
        ({"beams": 5, "length_penalty": 0.0}, {}, "beam search of 5; scores"),
        ({"length_penalty": 0.7, "ensembles": {"both": 2}}, {}, "greedy decoding, both: ensemble of 2; scores"),
    ],
)  # fmt: skip
def test_the_caption_says_what_was_scored(changes: dict[str, Any], rows: Any, found: str) -> None:
    caption = protocol_text({**PROTOCOL, **changes}, rows)
    assert caption == found if found.startswith("toy") else found in caption


def test_a_name_and_a_remark_are_shown_in_markdown_as_they_are() -> None:
    odd = "<b>a</b> | `b` *c* __init__ [d](http://e) &amp; \\\nno_change"
    row = {"total": SCORES, odd: SCORES, "S*m": SCORES}
    untrained = {"zero_shot": {odd: {"base": odd, "prompt": odd}}, "notes": {odd: [odd]}, "id_tokens": {odd: ID_TOKENS}}
    protocol = {**PROTOCOL, "dataset": odd, "remark": odd, **untrained}
    rows = {odd: {**row, "id_tokens": {"total": SCORES}}, "b": {**row, "change": SCORES}}
    html = MarkdownIt("commonmark").enable("table").render(report_text(protocol, rows, list(rows)))
    cells = re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", html)
    shown = html_escape(" ".join(odd.split()), quote=False)
    assert cells.count(shown) == 6 and "S*m" in cells  # of five rows and of a change type
    paragraphs = re.findall(r"<p>(.*?)</p>", html)
    assert sum(text.count(shown.replace('"', "&quot;")) for text in paragraphs) == 7
    assert set(re.findall(r"<(\w+)", html)) == {"table", "thead", "tbody", "tr", "th", "td", "p"}


def test_footnotes() -> None:
    row = {"total": {"ROUGE-L": 0.5, "CIDEr-D": 0.75}, "distractor": {"ROUGE-L": 1.0, "CIDEr-D": 0.0}}
    rows = {"ours": {**row, "move": {"ROUGE-L": 0.2, "CIDEr-D": 0.1}}}
    assert lines(type_table(rows))[1] == ["ours", "CIDEr-D", "10.00", "0.00 †"]
    assert system_table(rows).lines()[1][-2:] == ["75.00", "0.00 †"] and system_table(ROWS).note == ""
    notes = {"ours": ["2 of 4 captions are empty."]}
    protocol = {**PROTOCOL, "pairs": {"total": 40, "distractor": 5}, "notes": notes}
    weightless, small, empty = footnotes(protocol, rows)
    assert weightless.startswith("† CIDEr-D gives no weight") and "fewer than 30 pairs (distractor 5)" in small
    assert empty == "ours: 2 of 4 captions are empty."
    by_type = type_table(rows)
    assert by_type is not None and by_type.note == weightless
    answer = {"base": "org/vlm", "prompt": "What changed?", "sentences": 2}
    assert zero_shot_text(answer) == 'org/vlm, prompt "What changed?", 2 sentences of the answer'


TABLE = Table(
    ["BLEU-4", "50 %_x"],
    [
        (["a & <b>"], [Cell("25.00", best=True), Cell("50.00 †", "1.23", 1.0, best=True)]),
        (["base"], [Cell(""), Cell("25.00", "", 0.5)]),
    ],
    title="<t>",
)


def test_one_table_in_four_forms() -> None:
    assert TABLE.markdown().splitlines() == [
        "|  | BLEU-4 | 50 %\\_x |",
        "| --- | ---: | ---: |",
        "| a & \\<b\\> | 25.00 | 50.00 † ± 1.23 |",
        "| base | - | 25.00 |",
    ]
    assert TABLE.latex().splitlines() == [
        "\\begin{tabular}{lrr}",
        "\\toprule",
        " & BLEU-4 & 50 \\%\\_x \\\\",
        "\\midrule",
        "a \\& \\textless{}b\\textgreater{} & \\textbf{25.00} & \\textbf{50.00 $\\dagger$ $\\pm$ 1.23} \\\\",
        "base & - & 25.00 \\\\",
        "\\bottomrule",
        "\\end{tabular}",
    ]
    html = TABLE.html("bars", {"a & <b>": "red"}, muted=["base"])
    rows = re.findall(r"<tr.*?</tr>", html.replace("\n", ""))
    assert re.findall(r"<th.*?>(.*?)</th>", rows[0])[1:] == ["BLEU-4", "50 %_x"]
    assert rows[1].startswith('<tr style="--c:red"><th scope="row"><i class="dot"></i>a &amp; &lt;b&gt;</th>')
    assert re.findall("<td.*?</td>", rows[1]) == [
        '<td style="--v:0.0"><b>25.00</b></td>',
        '<td style="--v:1.0"><b>50.00 †</b><small> ± 1.23</small></td>',
    ]
    assert rows[2] == '<tr class="baseline"><th scope="row">base</th><td>\u2013</td><td style="--v:0.5">25.00</td></tr>'
    assert 'aria-label="&lt;t&gt;"' in html and '<table class="bars">' in html
    console = Console(width=80, record=True)
    console.print(TABLE.rich())
    assert [line.split() for line in console.export_text().splitlines()[-4:-1]] == [
        ["a", "&", "<b>", "25.00", "50.00", "†"],
        ["±", "1.23"],
        ["base", "-", "25.00"],
    ]


SCORED = {
    "base": {"total": {"CIDEr-D": 1.50004}, "color": {"CIDEr-D": 0.0}, "distractor": {"CIDEr-D": 1.0}, "seconds": None},
    "ours": {
        "total": {"CIDEr-D": 1.50011, "BLEU-4": 0.5},
        "color": {"CIDEr-D": 0.5},
        "distractor": {"CIDEr-D": 0.25},
        "seconds": 1234.0,
        "std": {"total": {"CIDEr-D": 0.0123}, "seconds": 10.0},
    },
}


def cells_of(table: Table) -> dict[str, Sequence[Cell]]:
    return {name: cells for (name,), cells in table.rows}


def test_cells_hold_text_bar_and_which_is_best() -> None:
    overview = score_tabs(SCORED)[0]
    assert overview.columns == ["BLEU-4", "CIDEr-D", "CIDEr-D distractor", "training seconds"]
    base, ours = (dict(zip(overview.columns, cells_of(overview)[name])) for name in ("base", "ours"))
    assert ours["CIDEr-D"] == Cell("150.01", "1.23", 1, best=True)
    assert base["CIDEr-D"].text == "150.00" and 0.99 < base["CIDEr-D"].fraction < 1 and not base["CIDEr-D"].best
    assert base["BLEU-4"] == Cell("") and ours["training seconds"] == Cell("1,234", "10")
    assert base["CIDEr-D distractor"].best and ours["CIDEr-D distractor"].fraction == 0.25
    (table,) = type_tabs(SCORED)
    assert table.title == "CIDEr-D" and table.columns == ["color", "distractor"]
    shades = {name: [(cell.fraction, cell.best) for cell in cells] for name, cells in cells_of(table).items()}
    assert shades == {"base": [(0, False), (1, True)], "ours": [(1, True), (0, False)]}
    assert type_tabs({"ours": {"total": {"CIDEr-D": 1.0}}}) == []
