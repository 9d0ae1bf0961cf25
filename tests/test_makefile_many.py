"""What `diffcap benchmark`, `make ablation` and `make demo` run, with the stages of `tests.test_makefile`."""

# ruff: noqa: F811  the fixture of the tests of Make itself

import itertools
import shlex
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.test_makefile import logged, play, project  # noqa: F401

pytestmark = pytest.mark.slow  # make

TITLES = {"Subtraction": "subtraction", "SCORER+CBR": "scorer_cbr"}
GRID = """
datasets: [{dataset: blocks, pairs: 60}]
methods: [scorer]
seeds: [1, 2]
finetune: {trainer: {max_steps: 7}}
"""


def test_the_rows_of_an_ablation_take_equal_steps_and_only_they_do(project: Path) -> None:
    words = "METHOD=scorer SEEDS=1,2 ABLATION=subtraction,scorer_cbr FOLDER=data/x DATA=/x PAIRS=60 TRAINER=smoke"
    runs = logged(project, "ablation", "ARGS=--steps=8", *words.split())
    counts = {stage: len(found) for stage, found in runs.items()}
    assert counts == {"data": 1, "extract": 1, "finetune": 4, "eval": 4, "report": 1}
    assert runs["data"][0].endswith("--pairs 60 --seed 1234") and "--steps" not in str(runs)
    for row, seed in itertools.product(TITLES.values(), "12"):
        place = f"--run.out runs/blocks/scorer-{row}-seed{seed}/finetune "
        (found,) = [options for options in runs["finetune"] if place in options]
        assert f"--run.ablation {row} " in found and "--run.preset smoke" in found
        assert f"--seed_everything {seed} " in found and f"--data.seed {seed} " in found
        assert found.endswith("--trainer.max_steps=8 --trainer.val_check_interval=2")
    table = {title: [f"runs/blocks/scorer-{row}-seed{seed}" for seed in "12"] for title, row in TITLES.items()}
    assert str(table) in shlex.split(runs["report"][0])
    assert "--out runs/blocks/benchmark/scorer-ablation" in runs["report"][0]


def test_an_ablation_takes_the_options_of_its_data(project: Path) -> None:
    runs = logged(project, "ablation", "METHOD=pcl", "ABLATION=pcl", "ARGS=--steps=60", "data_ARGS=--jitter=0.3")
    assert [options.split()[-2:] for options in runs["data"]] == [["--jitter", "0.3"]]


def benchmark(project: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (project / "grid.yaml").write_text(GRID)
    command = [".venv/bin/diffcap", "benchmark", "grid.yaml", *words]
    return subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)


def stages_of(project: Path) -> list[str]:
    """The stages that ran since the last call, sorted."""
    log = project / "log"
    lines = log.read_text().splitlines() if log.exists() else []
    log.unlink(missing_ok=True)
    return sorted(line.partition(" ")[0] for line in lines)


def test_jobs_train_their_parts_of_a_grid_and_the_command_without_a_part_writes_the_table(project: Path) -> None:
    assert "run the same command with --prepare instead of --shard" in benchmark(project, "--shard=0/2").stderr
    assert stages_of(project) == []
    assert benchmark(project, "--prepare").returncode == 0 and stages_of(project) == ["data", "extract"]
    with ThreadPoolExecutor() as pool:
        jobs = list(pool.map(lambda index: benchmark(project, f"--shard={index}/2"), range(2)))
    assert [job.returncode for job in jobs] == [0, 0] and "seed 1" in jobs[0].stdout and "seed 2" in jobs[1].stdout
    log = (project / "log").read_text()
    assert log.count("--trainer.max_steps 7") == 2, "the section of the grid"
    assert stages_of(project) == ["eval", "eval", "finetune", "finetune"]
    assert benchmark(project).returncode == 0 and stages_of(project) == ["report"]


def test_a_failing_experiment_does_not_stop_the_others_and_is_named(project: Path) -> None:
    play(project, "if stage == 'finetune' and value('--seed_everything') == '1': sys.exit(3)")
    done = benchmark(project)
    assert done.returncode == 1 and stages_of(project) == ["data", "eval", "extract", "finetune", "finetune"]
    assert "-m diffcap finetune --dataset blocks --method scorer --seed 1" in done.stderr
    assert "error: 1 of 2 experiments failed; their datasets have no new table." in done.stderr


def test_the_demo_trains_every_system_on_the_same_files(project: Path) -> None:
    runs = logged(project, "demo", "ARGS=--pairs=60 --jitter=0.5")
    assert {stage: len(found) for stage, found in runs.items()} == {
        **dict.fromkeys(("data", "extract", "negatives", "pretrain", "report"), 1),
        **dict.fromkeys(("finetune", "eval"), 3),
    }
    assert "--pairs 60 " in runs["data"][0] and runs["data"][0].endswith("--jitter 0.5")
    assert "--jitter" not in str(list(runs.values())[1:])
    assert all("--data.folder data/blocks-demo " in found for found in runs["finetune"])
