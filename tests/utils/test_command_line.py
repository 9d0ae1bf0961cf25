"""Command lines as users write them, in the form that jsonargparse reads."""

import json

import pytest

from diffcap.cli import FUNCTIONS, SYNTAX, flag_options
from diffcap.registry import import_object
from diffcap.utils.console import normalize_arguments

FLAGS = flag_options({name: import_object(path) for name, path in FUNCTIONS.items()})


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("caption a b --json", "caption a --after=b --json=true"),
        ("caption --beam 5 a --backbone-weights x-y b", "caption --beam 5 a --backbone_weights x-y --after=b"),
        ("caption --beam=5 a --out-file=x-y b", "caption --beam=5 a --out_file=x-y --after=b"),
        ("score a b --json --tokenizer raw", "score a --references=b --json=true --tokenizer raw"),
        ("score a b --json false", "score a --references=b --json false"),
        ("--help", "--help"),
        ("caption a --checkpoint", "caption a --checkpoint"),
        ("caption a --checkpoint --json", "caption a --json=true --checkpoint"),
        ("average --out x", "average --out x"),
    ],
)
def test_flags_names_and_second_words(written: str, read: str) -> None:
    assert normalize_arguments(written.split(), SYNTAX, FLAGS) == read.split()


@pytest.mark.parametrize(
    ("written", "read", "listed"),
    [
        ("caption --checkpoint x a b", "caption a --after=b", ["x"]),
        ("caption --checkpoint x a --checkpoint=y-z b", "caption a --after=b", ["x", "y-z"]),
        ("serve --checkpoint x y --port 1 --checkpoint z", "serve --port 1", ["x", "y", "z"]),
    ],
)
def test_an_option_with_a_list(written: str, read: str, listed: list[str]) -> None:
    assert normalize_arguments(written.split(), SYNTAX, FLAGS) == [*read.split(), f"--checkpoint={json.dumps(listed)}"]


def test_any_number_of_files() -> None:
    words = ["average", "a", "--out", "x", "b"]
    assert normalize_arguments(words, SYNTAX, FLAGS) == ["average", '["a", "b"]', "--out", "x"]
