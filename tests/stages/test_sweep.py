"""The sweep files: their own command line, as Weights & Biases' agent writes it, with sampled values, trains."""

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import optuna
import pytest
import yaml
from optuna.storages.journal import JournalFileBackend, JournalStorage
from tests.commands import ROOT, command, environment, in_process, part, run
from tests.preloaded import write_program
from tests.tiny_vlms import build
from wandb.sdk.launch.sweeps import utils as agent

from diffcap.experiment import Experiment

SWEEPS = sorted(path.stem for path in (ROOT / "configs/sweep").glob("*.yaml"))
DATASET = {"clip4idc": "clevr_change", "clip4idc_pretrain": "clevr_change"}  # of all others: blocks
BASE = "HuggingFaceTB/SmolVLM-500M-Instruct"
GOALS = {"val/CIDEr-D": "maximize", "val/t2p_R@1": "maximize", "val/mlm": "minimize"}
SMOKE = ["--trainer.max_steps=4", "--trainer.val_check_interval=2", "--trainer.limit_val_batches=1"]


def read(name: str) -> dict[str, Any]:
    return yaml.safe_load((ROOT / "configs" / "sweep" / f"{name}.yaml").read_text())


def stage_of(name: str) -> str:
    return "pretrain" if "pretrain" in name else "finetune"


def sample(parameter: dict[str, Any], draws: random.Random) -> Any:
    if "values" in parameter:
        return draws.choice(parameter["values"])
    low, high = parameter["min"], parameter["max"]
    assert 0 < low < high
    if parameter["distribution"] == "log_uniform_values":
        return math.exp(draws.uniform(math.log(low), math.log(high)))
    assert parameter["distribution"] == "uniform"
    return draws.uniform(low, high)


def agents_command(sweep: dict[str, Any], values: dict[str, Any]) -> list[str]:
    """What `wandb agent` runs: its own functions fill in `${...}`."""
    given = {"args": {name: {"value": value} for name, value in values.items()}, "program": sweep["program"]}
    filled = {**agent.create_sweep_command_args(given), "env": ["/usr/bin/env"]}
    words = []
    for word in agent.create_sweep_command(sweep["command"]):
        words += filled[word[2:-1]] if word.startswith("${") else [word]
    return words


@pytest.mark.parametrize("name", SWEEPS)
def test_the_experiment_comes_first_and_the_sampled_values_last(name: str) -> None:
    sweep, method, script = read(name), name.partition("_")[0], f"stages/{stage_of(name)}.py"
    base = [f"--vlm={BASE}"] if method == "vlm" else []
    experiment = [f"--dataset={DATASET.get(name, 'blocks')}", f"--method={method}", *base, "--logger=wandb"]
    assert sweep["command"] == ["${env}", "python", script, *experiment, "${args}"] and sweep["program"] == script
    header = (ROOT / "configs" / "sweep" / f"{name}.yaml").read_text().partition("\nproject:")[0]
    assert f"# Command: wandb sweep configs/sweep/{name}.yaml" in header
    assert f"diffcap sweep configs/sweep/{name}.yaml --trials 40" in header


@pytest.mark.parametrize("name", SWEEPS)
def test_the_settings_of_the_dataset_are_among_the_swept_values(name: str) -> None:
    experiment = Experiment(dataset=DATASET.get(name, "blocks"), method=name.partition("_")[0])
    for option, parameter in read(name)["parameters"].items():
        value = experiment.setting(stage_of(name), *option.split("."))
        if value is None or isinstance(value, dict):
            continue  # the default of the class; a mapping is swept as text
        if "values" in parameter:
            assert value in parameter["values"], option
        else:
            assert parameter["min"] <= value <= parameter["max"], option


@pytest.fixture(scope="module")
def project(pixels: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project's folder as `make pretrain DATASET=blocks` leaves it, and `python` as the active environment has it."""
    folder = tmp_path_factory.mktemp("project")
    for name in ("configs", "stages"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "data").mkdir()
    (folder / "data/blocks").symlink_to(pixels)
    files = f"--data.folder={pixels}", "--data.features=blocks", f"--run.out={folder / 'runs/blocks/pcl/pretrain'}"
    assert in_process(command("pretrain", [part("pcl", "pretrain", "blocks")], *files, *SMOKE)) is None
    build("smolvlm", folder / "tiny")
    (folder / "bin").mkdir()
    write_program(folder / "bin/python", [sys.executable])
    return folder


@pytest.mark.parametrize(
    "name",
    [
        name if name == "pcl" else pytest.param(name, marks=pytest.mark.thorough)
        for name in SWEEPS
        if name not in DATASET
    ],
)
def test_the_command_of_a_sweep_trains_with_sampled_values(project: Path, name: str) -> None:
    sweep = read(name)
    draws = random.Random(name)  # the same values in every run
    values = {key: sample(parameter, draws) for key, parameter in sweep["parameters"].items()}
    words = [word.replace(BASE, str(project / "tiny")) for word in agents_command(sweep, values)]
    assert words[-len(values) :] == [f"--{key}={value}" for key, value in values.items()]
    path = f"{project / 'bin'}:/usr/bin:/bin"
    identifiers = {"WANDB_SWEEP_ID": "s1", "WANDB_RUN_ID": "abc123", "WANDB_MODE": "offline"}
    if name != "pcl":  # one is trained; of the others the options are checked
        done = run([*words, "--print_config"], project, PATH=path, **identifiers)
        assert done.returncode == 0 and "init_args:" in done.stdout, done.stderr
        return
    done = run([*words, *SMOKE], project, PATH=path, **identifiers)
    assert done.returncode == 0, (values, done.stderr)
    out = project / "runs/blocks/pcl/sweep" / stage_of(name) / "abc123"  # each run of a sweep has its own
    assert json.loads((out / "finished.json").read_text())["steps"] == 4
    settings = yaml.safe_load((out / "config.yaml").read_text())
    for key, value in values.items():
        place = settings
        for name in key.split("."):
            place = place[name]
        assert place == (yaml.safe_load(value) if isinstance(value, str) else pytest.approx(value)), key
    columns = (out / "logs/version_0/metrics.csv").read_text().splitlines()[0].split(",")
    assert sweep["metric"]["name"] in columns
    assert sweep["metric"]["goal"] == GOALS[sweep["metric"]["name"]]
    assert len(list((out / "wandb").glob("offline-run-*-abc123"))) == 1
    assert {path.name for path in project.iterdir()} == {"configs", "stages", "data", "runs", "bin", "tiny"}


def test_a_killed_sweep_goes_on_in_two_commands_and_the_next_stage_reads_the_best(blocks: Path, tmp_path: Path) -> None:
    rate = {"distribution": "log_uniform_values", "min": 1e-4, "max": 3e-2}
    (tmp_path / "sweep.yaml").write_text(json.dumps({**read("scorer"), "parameters": {"model.lr": rate}}))
    lengths = "--trainer.max_steps=30", "--trainer.val_check_interval=10", "--run.checkpoint_every=2"
    options = "--folder", str(blocks), "--trainer", "smoke", *lengths
    words = [sys.executable, "-m", "diffcap", "sweep", "sweep.yaml", "--trials", "2", "--", *options]

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            words, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, process_group=0, text=True
        )

    folder, first = tmp_path / "runs/blocks/scorer/sweep/finetune", start()
    while not list(folder.glob("*/last.ckpt")):
        assert first.poll() is None
        time.sleep(0.01)
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    both = [start(), start()]
    outputs = [process.communicate(timeout=300)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert "trial 0 was interrupted" in "".join(outputs)
    storage = JournalStorage(JournalFileBackend(str(folder / "study.log")))
    killed, repeated, other = optuna.load_study(study_name="scorer finetune", storage=storage).trials
    assert [trial.state.name for trial in (killed, repeated, other)] == ["FAIL", "COMPLETE", "COMPLETE"]
    assert killed.params == repeated.params != other.params
    (rows,) = folder.glob("*/logs/version_1/metrics.csv")  # of the training that was resumed
    assert yaml.safe_load((rows.parents[2] / "config.yaml").read_text())["model"]["lr"] == repeated.params["model.lr"]
    best = max(repeated, other, key=lambda trial: trial.value)
    words = [sys.executable, "-m", "diffcap", "finetune", "--config", str(folder / "best.yaml"), "--print_config"]
    settings = yaml.safe_load(run(words, tmp_path).stdout)
    assert settings["model"]["lr"] == best.params["model.lr"] and settings["trainer"]["max_steps"] == 30
    assert settings["run"]["out"] == "runs/blocks/scorer/finetune"
