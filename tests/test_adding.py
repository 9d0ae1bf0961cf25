"""A package outside the project, installed by pip, adds a method and a dataset; every command works with them."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tests.commands import ROOT, one_sentence, run
from tests.datasets.layouts import write_image
from tests.preloaded import write_program

pytestmark = pytest.mark.slow  # an installed package

PACKAGE = ROOT / "tests/toy_package"
DIFFCAP = [sys.executable, "-m", "diffcap"]
VARIABLES = ["--dataset", "shapes", "--method", "gru", "--trainer", "smoke", "--logger", "none"]
MAKE = ["make", "DATASET=shapes", "METHOD=gru", "TRAINER=smoke", "LOGGER=none"]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds what pip installs of the package."""
    source, site = (tmp_path_factory.mktemp(name) for name in ("source", "site"))
    shutil.copytree(PACKAGE, source, dirs_exist_ok=True)  # setuptools writes build/ beside pyproject.toml
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    offline = ["--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, *offline, "--target", str(site), str(source)], check=True)
    return site


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, site: Path) -> Path:
    """A folder in which the package's method was trained and evaluated on the package's dataset by one make command."""
    folder = tmp_path_factory.mktemp("toy")
    lines = []
    for number in range(24):
        write_image(folder / f"files/before/{number}.png", number)
        write_image(folder / f"files/after/{number}.png", number + 1)
        split = ("train", "train", "train", "val", "test", "test")[number % 6]
        caption = f"the {('red', 'blue')[number % 2]} cube moved to place {number % 5}"
        lines.append(f"{split}\tbefore/{number}.png\tafter/{number}.png\t{caption}\n")
    (folder / "files/captions.tsv").write_text("".join(lines))
    for name in ("Makefile", "pyproject.toml", "requirements.lock"):
        shutil.copy(ROOT / name, folder)
    (folder / ".venv/bin").mkdir(parents=True)
    write_program(folder / ".venv/bin/diffcap", DIFFCAP)
    (folder / ".venv/ready").touch()  # newer than the copies, so that make sets nothing up
    stages = ["data", "extract", "finetune", "eval", "report"]
    done = run([*MAKE, *stages, "DATA=files"], folder, timeout=400, PYTHONPATH=str(site))
    assert done.returncode == 0, done.stderr
    return folder


def test_every_stage_runs_with_the_settings_of_the_package(trained: Path) -> None:
    run = trained / "runs/shapes/gru"
    metrics = json.loads((run / "eval/metrics.json").read_text())
    assert metrics["protocol"]["dataset"] == "shapes" and metrics["protocol"]["pairs"]["total"] == 8
    assert metrics["provenance"]["method"] == "gru" and metrics["provenance"]["features"] == "blocks"
    assert "gru" in (run / "report/table.md").read_text() and (run / "report/report.html").stat().st_size > 10_000
    config = (run / "finetune/config.yaml").read_text()
    assert "diffcap_toy.gru.GRU" in config and "batch_size: 16" in config


def test_its_captioner_is_exported_and_captions(trained: Path, site: Path) -> None:
    checkpoint = "runs/shapes/gru/finetune/best.ckpt"
    done = run([*DIFFCAP, "export", checkpoint, "--out", "exported"], trained, PYTHONPATH=str(site))
    assert done.returncode == 0, done.stderr
    images = ["files/before/0.png", "files/after/0.png"]
    outputs = [
        run([*DIFFCAP, "caption", *images, "--checkpoint", source], trained, PYTHONPATH=str(site))
        for source in (checkpoint, "exported")
    ]
    assert outputs[0].returncode == 0 and outputs[0].stdout and outputs[0].stdout == outputs[1].stdout


@pytest.mark.thorough
def test_its_ablation_has_a_row_for_each_of_its_own(trained: Path, site: Path) -> None:
    words = ["benchmark", str(ROOT / "configs/benchmark/ablation.yaml"), *VARIABLES, "--steps=2"]
    done = run([*DIFFCAP, *words], trained, timeout=400, PYTHONPATH=str(site))
    assert done.returncode == 0, done.stderr
    table = (trained / "runs/shapes/benchmark/gru-ablation/table.md").read_text()
    assert "the second image alone" in table and "the difference" in table


def test_a_checkpoint_of_a_package_that_is_not_installed_is_one_sentence(trained: Path) -> None:
    images = ["files/before/0.png", "files/after/0.png"]
    done = run([*DIFFCAP, "caption", *images, "--checkpoint", "runs/shapes/gru/finetune/best.ckpt"], trained)
    assert "its method 'gru' is unknown" in one_sentence(done) and "Install the package" in done.stderr


def test_a_captioner_of_no_registered_method_is_refused_before_training(trained: Path) -> None:
    config = trained / "unregistered.yaml"
    config.write_text(yaml.safe_dump(yaml.safe_load((PACKAGE / "diffcap_toy/gru.yaml").read_text())["finetune"]))
    trainer = [f"--config={ROOT}/configs/trainer/{name}.yaml" for name in ("default", "smoke")]
    data = ["--data.folder=data/shapes", "--data.features=blocks", "--run.out=runs/unknown/finetune"]
    words = [sys.executable, str(ROOT / "stages/finetune.py"), f"--config={config}", *trainer, *data]
    code_only = trained / "unregistered"  # the package without its entry points
    shutil.copytree(PACKAGE / "diffcap_toy", code_only / "diffcap_toy", dirs_exist_ok=True)
    done = run(words, trained, PYTHONPATH=str(code_only))
    assert "diffcap_toy.gru:GRU is the captioner of no registered method" in one_sentence(done)
    assert not (trained / "runs/unknown/finetune/last.ckpt").exists()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("nowhere:gru.yaml", "the package nowhere has no folder; correct its name"),
        ("diffcap_toy:DATASET", "is not a settings file of a method; write package:<method>.yaml there"),
        ("diffcap_toy:other.yaml", "is not a settings file of a method; write package:<method>.yaml there"),
    ],
)
def test_a_broken_entry_point_is_one_sentence(tmp_path: Path, site: Path, value: str, expected: str) -> None:
    shutil.copytree(site, tmp_path, dirs_exist_ok=True)
    (tmp_path / "diffcap_toy-0.1.dist-info/entry_points.txt").write_text(f"[diffcap.methods]\nbroken = {value}\n")
    done = run([*DIFFCAP, "finetune", "--method", "broken"], tmp_path, PYTHONPATH=str(tmp_path))
    assert f"entry point diffcap.methods: broken = {value}" in one_sentence(done) and expected in done.stderr


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("        width: 32", "        widht: 32", "unknown option --widht, did you mean --width (in {file})"),
        ("captioner: diffcap_toy.gru:GRU", "captioner: diffcap_toy.gru:Gru", "correct the import path in {file}"),
    ],
)
def test_a_fault_of_the_settings_names_their_file(
    trained: Path, site: Path, tmp_path: Path, old: str, new: str, expected: str
) -> None:
    shutil.copytree(site, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "diffcap_toy/gru.yaml"
    file.write_text(file.read_text().replace(old, new, 1))
    done = run([*DIFFCAP, "finetune", *VARIABLES, "--run", "runs/fault"], trained, PYTHONPATH=str(tmp_path))
    assert expected.format(file=file) in one_sentence(done)


def test_a_name_that_is_taken_is_one_sentence(tmp_path: Path, site: Path) -> None:
    shutil.copytree(site, tmp_path, dirs_exist_ok=True)
    (tmp_path / "diffcap_toy/gru.yaml").rename(tmp_path / "diffcap_toy/scorer.yaml")
    points = tmp_path / "diffcap_toy-0.1.dist-info/entry_points.txt"
    points.write_text(points.read_text().replace("gru.yaml", "scorer.yaml"))
    done = run([*DIFFCAP, "finetune"], tmp_path, PYTHONPATH=str(tmp_path))
    assert "the name 'scorer' is taken already" in one_sentence(done)


def test_the_page_about_adding_shows_the_package_as_it_is() -> None:
    page = (ROOT / "docs/adding.md").read_text()
    files = {
        str(path.relative_to(PACKAGE)): path.read_text()
        for path in PACKAGE.rglob("*")
        if path.suffix in (".py", ".yaml", ".toml") and "build" not in path.parts
    }
    assert dict(re.findall(r"`([\w/.-]+)`:\n\n```\w*\n(.*?)```", page, re.S)) == files
