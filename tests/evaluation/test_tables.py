"""Tables show the same numbers, times 100."""

import pytest

from diffcap.evaluation.captions import score_captions
from diffcap.evaluation.tables import is_weightless, markdown_table, metrics_table, print_table, score_notes

ROWS = {"total": {"BLEU-4": 0.51237, "CIDEr-D": 1.2894}, "semantic": {"BLEU-4": 0.5}}


def test_markdown_has_a_row_a_group_and_a_dash_for_what_is_not_there() -> None:
    assert markdown_table(ROWS, "group", digits=1).splitlines() == [
        "| group | BLEU-4 | CIDEr-D |",
        "| --- | ---: | ---: |",
        "| total | 51.2 | 128.9 |",
        "| semantic | 50.0 | - |",
    ]


def test_a_printed_table_is_whole_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    wide = {"a long name of a group": {f"metric-{n}": n / 7 for n in range(9)}}
    print_table(metrics_table(wide, "scores"))
    printed = capsys.readouterr().out
    assert "scores" in printed and "a long name of a group" in printed
    assert all(f"metric-{n}" in printed and f"{100 * n / 7:.2f}" in printed for n in range(9))


def test_names_in_a_table_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(metrics_table({"[red]x[/red] :smile:": {"m": 0.5}, "\x1b[31m\u202e": {"m": 0.25}}, "a\x9b [b]\nc"))
    printed = capsys.readouterr().out
    assert "[red]x[/red] :smile:" in printed and "\\x1b[31m\\u202e" in printed
    assert [line.strip() for line in printed.splitlines()[:2]] == ["a\\x9b [b]", "c"]


def test_a_group_whose_perfect_captions_get_no_cider_has_a_footnote(capsys: pytest.CaptureFixture[str]) -> None:
    metrics = ("BLEU-1", "ROUGE-L", "CIDEr-D")
    one = score_captions({"a": "the cube moved"}, {"a": ["the cube moved"]}, "raw", metrics)
    two = score_captions({"a": "it moved", "b": "it grew"}, {"a": ["it moved"], "b": ["it grew"]}, "raw", metrics)
    wrong = score_captions({"a": "x", "b": "y"}, {"a": ["it moved"], "b": ["it grew"]}, "raw", metrics)
    assert one["CIDEr-D"] == 0 and one["ROUGE-L"] == 1
    common = {"BLEU-4": 1e-6, "ROUGE-L": 0.3, "CIDEr-D": 0.0}  # wrong captions that share "the" with all references
    assert [is_weightless(scores) for scores in (one, two, wrong, common, {})] == [True, *[False] * 4]
    print_table(metrics_table({"one": one, "two": two}, pairs={"one": 1, "two": 30}))
    printed = " ".join(capsys.readouterr().out.split())
    assert "0.00 †" in printed and printed.count("†") == 2 and "fewer than 30 pairs (one 1)" in printed
    assert "0.00 † |" in markdown_table({"one": one}) and score_notes([two], {"two": 30}) == []
