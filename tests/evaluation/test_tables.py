"""Tables show the same numbers, times 100."""

import pytest

from diffcap.evaluation.tables import markdown_table, metrics_table, print_table

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
