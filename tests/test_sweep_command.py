"""`diffcap sweep`: its file, the trials with a shell script as their training. tests/stages/test_sweep.py has real trainings."""

import json
import sys
from pathlib import Path
from typing import Any

import optuna
import pytest
import yaml
from optuna.storages.journal import JournalFileBackend, JournalStorage
from tests.commands import ROOT

from diffcap.commands import sweep as command
from diffcap.commands.sweep import Search, sweep
from diffcap.utils.errors import DiffcapError

RANGE = {"distribution": "log_uniform_values", "min": 1e-4, "max": 3e-2}
SWEEP = {
    **{"program": "stages/finetune.py", "name": "s", "method": "grid", "parameters": {"model.lr": {"values": [1, 0]}}},
    "metric": {"name": "val/CIDEr-D", "goal": "maximize"},
    "command": ["${env}", "python", "stages/finetune.py", "--dataset=blocks", "--method=scorer", "${args}"],
}
FOLDER = Path("runs/blocks/scorer/sweep/finetune")
# A shell script that replaces the training. It logs the sampled value, its last argument, as the score of a validation.
TRAINING = """#!/bin/sh
for word; do value=${word#*=}; done
logs=${4#*=}/sweep/finetune/$DIFFCAP_TRIAL/logs/version_0; mkdir -p $logs; echo "$*" >> words
printf "step,val/CIDEr-D\\n5,$value\\n" > $logs/metrics.csv
"""
PRUNABLE = "trap 'kill $!; touch stopped; exit 1' TERM; if [ $value = 0 ]; then sleep 60 & wait; fi"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in which the stages before the training count as made, and no training is real."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "is_made", lambda stage, e: True)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "training"))
    monkeypatch.setattr(command, "signal", lambda *_: None)  # pytest has a handler of its own
    return tmp_path


def write(folder: Path, script: str = "", **changes: Any) -> Path:
    (folder / "training").write_text(TRAINING + script)
    (folder / "training").chmod(0o755)
    (folder / "sweep.yaml").write_text(json.dumps({**SWEEP, **changes}))
    return folder / "sweep.yaml"


def states() -> list[str]:
    storage = JournalStorage(JournalFileBackend(str(FOLDER / "study.log")))
    return [trial.state.name for trial in optuna.load_study(study_name="s", storage=storage).trials]


@pytest.mark.parametrize("file", sorted((ROOT / "configs/sweep").glob("*.yaml")), ids=lambda file: file.stem)
def test_every_file_of_weights_and_biases_is_read(here: Path, file: Path) -> None:
    search = Search(file, ["--trainer", "smoke"], None)
    content = yaml.safe_load(file.read_text())
    params = search.study.ask(search.space).params
    assert list(params) == list(content["parameters"]) and f"stages/{search.stage}.py" == content["program"]
    words = search._words(params)
    assert {word for word in content["command"] if word.startswith(("--dataset", "--method", "--vlm"))} < {*words}
    assert "--trainer=smoke" in words and "--logger=none" in words and "--logger=wandb" not in words


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"method": "genetic"}, "method is genetic; give bayes or random or grid"),
        ({"program": "train.py"}, "program is train; give pretrain or finetune"),
        ({"metric": {"goal": "maximize"}}, "'name' is missing"),
        ({"parameters": {"model.lr": {"distribution": "normal", "mu": 0}}}, r"model.lr: .*the distribution is normal"),
        ({"parameters": {"model.lr": {**RANGE, "min": 1}}}, "model.lr: not the values of a parameter"),
        ({"parameters": {"model.lr": {"max": 1}}}, "model.lr: not the values of a parameter"),
        ({"parameters": {"model.lr": RANGE}}, "method is grid, and model.lr has a range"),
        ({"early_terminate": {"type": "hyperband", "max_iter": 9}}, "early_terminate needs"),
    ],
)
def test_a_fault_of_the_file_is_one_sentence_before_the_first_trial(here: Path, changes: dict, fault: str) -> None:
    with pytest.raises(DiffcapError, match=fault):
        sweep(write(here, **changes))
    assert not (here / "words").exists()


def test_a_grid_ends_with_the_best_values_and_is_not_repeated(here: Path, capsys: pytest.CaptureFixture) -> None:
    for _ in range(2):
        sweep(write(here), options=["--trainer.max_steps", "7", "--seed=3"])
    assert len((here / "words").read_text().splitlines()) == 2
    (best,) = here.rglob("best.yaml")
    content = {"dataset": "blocks", "method": "scorer", "seed": "3"}
    assert yaml.safe_load(best.read_text()) == content | {"finetune": {"trainer": {"max_steps": 7}, "model": {"lr": 1}}}
    for changes in ({"parameters": {"model.lr": {"values": [1, 0, 2]}}}, {}):
        options = ["--seed=3", *(["--trainer.max_steps", "7"] if changes else [])]
        with pytest.raises(DiffcapError, match=r"study.log: the study has .* than .*sweep.yaml .* --study"):
            sweep(write(here, **changes), options=options)


def test_early_terminate_sends_sigterm_to_a_poor_training(here: Path) -> None:
    sweep(write(here, PRUNABLE, early_terminate={"type": "hyperband", "min_iter": 1, "eta": 2}))
    assert states() == ["COMPLETE", "PRUNED"]
    assert (here / "stopped").exists()


def test_failed_trainings_end_the_command_and_so_does_a_metric_that_is_not_logged(here: Path) -> None:
    with pytest.raises(DiffcapError, match="the last 3 trials failed"):
        sweep(write(here, "exit 1", parameters={"model.lr": {"values": [1, 2, 3, 4]}}))
    assert states() == ["FAIL"] * 3 + ["WAITING"]
    sweep(write(here, parameters={"model.lr": {"values": [1, 2, 3, 4]}}))  # the cause is corrected
    assert states() == ["FAIL"] * 3 + ["COMPLETE"] * 4
    with pytest.raises(DiffcapError, match=r"metric.name is val/CIDEr, but validation logs val/CIDEr-D"):
        sweep(write(here, metric={"name": "val/CIDEr", "goal": "maximize"}), study=here / "other.log")
