"""The tagger stage through its real command, for a few steps."""

import json
import subprocess
import sys
from pathlib import Path

from diffcap.text.conllu import write_conllu
from diffcap.text.tagging import tag_sentences

STAGE = Path(__file__).parents[2] / "stages" / "tagger.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, STAGE, *arguments], capture_output=True, text=True, check=False)


def test_blocks_captions_make_a_tagger(tmp_path: Path) -> None:
    done = run("--out", str(tmp_path / "t"), "--scenes=60", "--steps=60", "--width=16", "--learning_rate=0.03")
    assert done.returncode == 0, done.stderr
    assert "UPOS" in done.stdout
    assert sorted(path.name for path in (tmp_path / "t").iterdir()) == ["metrics.json", "resources.json", "tagger.pt"]
    metrics = json.loads((tmp_path / "t" / "metrics.json").read_text())
    assert metrics["upos_accuracy"] > 0.9 and metrics["noun_or_adjective_accuracy"] > 0.9
    tags = tag_sentences(["the red cube was added"], str(tmp_path / "t"))
    assert tags == {"the red cube was added": ["DET", "ADJ", "NOUN", "AUX", "VERB"]}


def test_any_conllu_file_makes_a_tagger(tmp_path: Path) -> None:
    sentence = [("hier", "ADV"), ("steht", "VERB"), ("ein", "DET"), ("Haus", "NOUN")]
    write_conllu(tmp_path / "train.conllu", [sentence[: 2 + number % 3] for number in range(30)])
    write_conllu(tmp_path / "test.conllu", [sentence])
    files = "--conllu", str(tmp_path / "train.conllu"), "--held_out", str(tmp_path / "test.conllu")
    done = run("--out", str(tmp_path / "t"), *files, "--steps=15", "--width=8")
    assert done.returncode == 0, done.stderr
    metrics = json.loads((tmp_path / "t" / "metrics.json").read_text())
    assert metrics["held_out_words"] == 4 and metrics["trained_on_sentences"] == 30


def test_bad_input_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "bad.conllu").write_text("1\tword\n")
    for arguments, complaint in (
        (["--conllu", str(tmp_path / "bad.conllu")], "line 1: 2 columns"),
        (["--conllu", str(tmp_path / "none.conllu")], "no CoNLL-U file there"),
        (["--share=2"], "share must lie between 0 and 1"),
        (["--stepz=3"], "stepz"),
    ):
        done = run("--out", str(tmp_path / "t"), *arguments)
        assert done.returncode != 0
        assert complaint in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "t").exists()
