"""The training of a tagger by its real command, for a few steps."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.commands import ROOT

from diffcap.text.stanza_tagger import write_conllu
from diffcap.text.tagging import tag_sentences
from diffcap.utils.errors import DiffcapError
from diffcap.worlds.training.tagger import split_held_out, train_tagger

SENTENCES = [[("the", "DET"), (f"word{number % 20}", "NOUN")] for number in range(60)]


def test_held_out_sentences_are_never_trained_on() -> None:
    train, held_out = split_held_out(SENTENCES, seed=3)
    assert len(held_out) == 2 and len(train) == 54
    assert not {str(each) for each in train} & {str(each) for each in held_out}
    assert split_held_out(SENTENCES, seed=3)[1] == held_out != split_held_out(SENTENCES, seed=4)[1]


@pytest.mark.slow
def test_blocks_captions_make_a_tagger(tmp_path: Path) -> None:
    options = ["--out", str(tmp_path / "t"), "--scenes=20", "--steps=3", "--width=8"]
    command = [sys.executable, ROOT / "stages" / "shipped.py", "tagger", *options]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "UPOS" in done.stdout
    assert sorted(path.name for path in (tmp_path / "t").iterdir()) == ["metrics.json", "resources.json", "tagger.pt"]
    metrics = json.loads((tmp_path / "t" / "metrics.json").read_text())
    assert metrics["steps"] == 3 and metrics["trained_on_sentences"] > metrics["held_out_sentences"] > 0
    assert len(tag_sentences(["the red cube was added"], str(tmp_path / "t"))["the red cube was added"]) == 5


def test_too_few_sentences_are_one_sentence(tmp_path: Path) -> None:
    write_conllu(tmp_path / "one.conllu", SENTENCES[:1])
    with pytest.raises(DiffcapError, match="0 training sentences and 1 held-out ones"):
        train_tagger(tmp_path / "t", str(tmp_path / "one.conllu"))
    assert not (tmp_path / "t").exists()
