"""Tables show the same numbers, times 100."""

import pytest

from diffcap.evaluation.captions import score_captions
from diffcap.evaluation.tables import caption_notes, is_weightless, metrics_table, print_table, score_notes

ROWS = {"total": {"BLEU-4": 0.51237, "CIDEr-D": 1.2894}, "semantic": {"BLEU-4": 0.5}}


def test_markdown_has_a_row_a_group_and_a_dash_for_what_is_not_there() -> None:
    assert metrics_table(ROWS).markdown().splitlines() == [
        "|  | BLEU-4 | CIDEr-D |",
        "| --- | ---: | ---: |",
        "| total | 51.24 | 128.94 |",
        "| semantic | 50.00 | - |",
    ]


def test_names_in_a_table_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    wide = {f"metric-{number}": number / 7 for number in range(9)}
    print_table(metrics_table({"[red]x[/red] :smile:": wide, "\x1b[31m\u202e": wide}, "a\x9b [b]\nc"))
    printed = capsys.readouterr().out
    assert all(name in printed and f"{100 * value:.2f}" in printed for name, value in wide.items())  # whole in a pipe
    assert "[red]x[/red] :smile:" in printed and "\\x1b[31m\\u202e" in printed
    assert [line.strip() for line in printed.splitlines()[:2]] == ["a\\x9b [b]", "c"]


def test_a_group_whose_perfect_captions_get_no_cider_has_a_footnote(capsys: pytest.CaptureFixture[str]) -> None:
    metrics = ("BLEU-1", "ROUGE-L", "CIDEr-D")
    one = score_captions({"a": "the cube moved"}, {"a": ["the cube moved"]}, "raw", metrics)
    two = score_captions({"a": "it moved", "b": "it grew"}, {"a": ["it moved"], "b": ["it grew"]}, "raw", metrics)
    wrong = score_captions({"a": "x", "b": "y"}, {"a": ["it moved"], "b": ["it grew"]}, "raw", metrics)
    assert one["CIDEr-D"] == 0 and one["ROUGE-L"] == 1
    bad = score_captions({"a": "a ball"}, {"a": ["the cube moved"]}, "raw", metrics)
    equal = score_captions({"a": "x", "b": "y"}, {"a": ["it moved"], "b": ["it moved"]}, "raw", metrics)
    # The note is also true of captions that are wrong in a group where others get more.
    assert [is_weightless(row) for row in (one, bad, equal, wrong, two, {})] == [True] * 4 + [False] * 2
    print_table(metrics_table({"one": one, "two": two}, pair_counts={"one": 1, "two": 30}))
    printed = " ".join(capsys.readouterr().out.split())
    assert "0.00 †" in printed and printed.count("†") == 2 and "fewer than 30 pairs (one 1)" in printed
    assert "0.00 † |" in metrics_table({"one": one}).markdown() and score_notes([two], {"two": 30}) == []


CHANGES = [f"the car {number} left" for number in range(6)]
HALF = [*CHANGES[:5], *["there is no change"] * 5]  # references of ten pairs
STILL = ["there is no change"] * 10


@pytest.mark.parametrize(
    ("captions", "references", "notes"),
    [
        (CHANGES, CHANGES, []),
        (["It moved ."] * 4 + CHANGES[4:], CHANGES, ['4 of 6 captions are "it moved"; the references of 0 of these']),
        (["it moved"] * 3 + CHANGES[3:], CHANGES, []),  # not more than half
        (["it moved"] * 2, CHANGES[:2], []),  # two can be chance
        (["nothing has changed"] * 10, HALF, ['10 of 10 captions are "nothing has changed"; the references of 5 of']),
        ([*CHANGES[:3], *["nothing has changed"] * 7], HALF, []),  # right about those without change, and wrong twice
        (["nothing has changed"] * 10, STILL, []),
        (
            [*["nothing has changed"] * 15, *CHANGES[:5]],
            [*STILL, *CHANGES[:5], *CHANGES[:5]],
            ['15 of 20 captions are "nothing has changed"; the references of 10 of'],
        ),
        (["", " .", *CHANGES[2:]], CHANGES, ["2 of 6 captions are empty."]),
        ([""] * 6, CHANGES, ["6 of 6 captions are empty."]),
    ],
)
def test_equal_and_empty_captions_have_a_note(captions: list[str], references: list[str], notes: list[str]) -> None:
    ids = [str(number) for number in range(len(captions))]
    found = caption_notes(dict(zip(ids, captions)), {id: [text, text] for id, text in zip(ids, references)})
    assert len(found) == len(notes) and all(words in note for words, note in zip(notes, found)), found
