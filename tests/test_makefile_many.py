"""What `make ablation` and `make demo` run, with the stages of `tests.test_makefile`."""

# ruff: noqa: F811  the fixture of the tests of Make itself

import shlex
from pathlib import Path

import pytest
from tests.test_makefile import logged, project  # noqa: F401

pytestmark = pytest.mark.slow  # make


def test_the_rows_of_an_ablation_take_equal_steps_and_only_they_do(project: Path) -> None:
    words = "SEEDS=1,2", "ARGS=--steps=8 --rows=subtraction,scorer_cbr", "FOLDER=data/x", "PAIRS=60", "TRAINER=smoke"
    runs = logged(project, "ablation", "METHOD=scorer", "DATA=/x", *words)
    assert {stage: len(found) for stage, found in runs.items()} == {
        "data": 1,
        "extract": 1,
        "finetune": 4,
        "eval": 4,
        "report": 1,
    }
    assert runs["data"][0].endswith("--pairs 60 --seed 1234") and "--steps" not in str(runs)
    places = [f"runs/blocks/scorer-ablation/{row}-{seed}" for row in ("scorer_cbr", "subtraction") for seed in (1, 2)]
    for place in places:
        row, seed = place.rpartition("/")[2].split("-")
        (found,) = [options for options in runs["finetune"] if f"--run.out {place}/finetune " in options]
        assert f"--run.ablation {row} " in found and "--run.preset smoke" in found
        assert f"--seed_everything {seed} " in found and f"--data.seed {seed} " in found
        assert found.endswith("--trainer.max_steps=8 --trainer.val_check_interval=2")
    assert all(place in runs["report"][0] for place in places) and "--out runs/blocks/scorer-ablation/report" in str(
        runs
    )


def test_an_ablation_takes_the_options_of_its_data(project: Path) -> None:
    runs = logged(project, "ablation", "METHOD=pcl", "ARGS=--rows=pcl --steps=60", "data_ARGS=--jitter=0.3")
    assert [options.split()[-2:] for options in runs["data"]] == [["--jitter", "0.3"]]


def test_the_rows_that_a_conclusion_rests_on_have_more_seeds(project: Path) -> None:
    words = ["METHOD=scorer", "SEEDS=1", "ARGS=--rows=rr,scorer_cbr --more_seeds=1,2,3 --repeated=rr"]
    runs = logged(project, "ablation", *words)
    place = "runs/blocks/scorer-ablation"
    trained = [run.split("--run.out ")[1].split()[0] for run in runs["finetune"]]
    assert sorted(trained) == [f"{place}/{run}/finetune" for run in ("rr-1", "rr-2", "rr-3", "scorer_cbr-1")]
    (report,) = runs["report"]
    assert str(
        {"RR": [f"{place}/rr-{seed}" for seed in (1, 2, 3)], "SCORER+CBR": [f"{place}/scorer_cbr-1"]}
    ) in shlex.split(report)


def test_the_demo_trains_every_system_on_the_same_files(project: Path) -> None:
    runs = logged(project, "demo", "ARGS=--pairs=60 --jitter=0.5")
    assert {stage: len(found) for stage, found in runs.items()} == {
        **dict.fromkeys(("data", "extract", "negatives", "pretrain", "report"), 1),
        **dict.fromkeys(("finetune", "eval"), 3),
    }
    assert "--pairs 60 " in runs["data"][0] and runs["data"][0].endswith("--jitter 0.5")
    assert "--jitter" not in str(list(runs.values())[1:])
    assert all("--data.folder data/blocks-demo " in found for found in runs["finetune"])
