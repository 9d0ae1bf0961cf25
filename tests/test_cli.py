"""The command `diffcap` in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.commands import one_sentence

REFERENCES = {
    "annotations": [{"image_id": i, "id": i, "caption": c} for i, c in enumerate(["The cube moved.", "No change."])]
}
PREDICTIONS = [{"image_id": i, "caption": c} for i, c in enumerate(["the cube moved", "no change"])]


def diffcap(
    *arguments: str | Path, program: tuple[str, ...] | list[str] = (sys.executable, "-m", "diffcap")
) -> subprocess.CompletedProcess[str]:
    command = [*program, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    predictions, references = tmp_path / "predictions.json", tmp_path / "references.json"
    predictions.write_text(json.dumps(PREDICTIONS))
    references.write_text(json.dumps(REFERENCES))
    return predictions, references


def test_help_names_the_arguments() -> None:
    general, one = diffcap("--help"), diffcap("score", "--help")
    assert general.returncode == one.returncode == 0
    assert "score" in general.stdout
    assert "--tokenizer {ptb,raw}" in one.stdout and "COCO results file" in one.stdout


def test_help_of_average_shows_the_form_that_is_accepted() -> None:
    shown = diffcap("average", "--help").stdout
    assert "CHECKPOINT [CHECKPOINT ...]" in shown and '["PATH1"' not in shown
    version = diffcap("--version", program=[str(Path(sys.executable).with_name("diffcap"))])
    assert version.stdout.startswith("diffcap 0.")


@pytest.mark.slow
def test_score_prints_json(files: tuple[Path, Path]) -> None:
    result = json.loads(diffcap("score", *files, "--json").stdout)
    scores = result["groups"]["total"]
    assert scores["BLEU-1"] == pytest.approx(1) and scores["ROUGE-L"] == pytest.approx(1)
    assert scores["METEOR"] == pytest.approx(1, abs=0.01)
    assert result["protocol"] == {"tokenizer": "ptb", "metrics": list(scores), "pairs": {"total": 2}}
    assert set(result["provenance"]["predictions"]) == {"file", "sha256"}


def test_bad_files_give_one_sentence_and_a_failure(files: tuple[Path, Path], tmp_path: Path) -> None:
    predictions, references = files
    assert "nowhere.json" in one_sentence(diffcap("score", tmp_path / "nowhere.json", references))
    predictions.write_text(json.dumps(PREDICTIONS)[:-9])
    assert "not valid JSON" in one_sentence(diffcap("score", predictions, references))
    predictions.write_text(json.dumps(PREDICTIONS[:1]))
    output = one_sentence(diffcap("score", predictions, references))
    assert "1 of 2 reference ids have no prediction ('1')" in output and str(predictions) in output


def test_unknown_options_and_values_are_refused(files: tuple[Path, Path]) -> None:
    for wrong in (["--tokeniser=ptb"], ["--tokenizer=spacy"]):
        done = diffcap("score", *files, *wrong)
        assert done.returncode != 0 and "error" in done.stderr and "Traceback" not in done.stderr
