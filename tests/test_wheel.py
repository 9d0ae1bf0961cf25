"""The wheel, installed where there is no checkout: all stages run in an empty folder."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.commands import ROOT, run

EXPERIMENT = ["--dataset", "blocks", "--pairs", "60", "--method", "scorer", "--trainer", "smoke", "--logger", "none"]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the wheel's content alone."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("installed")
    for name in ("src", "configs"):
        shutil.copytree(
            ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("*.egg-info", "__pycache__")
        )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(target / "dist"), str(source)]
    subprocess.run(build, check=True)
    (wheel,) = (target / "dist").glob("*.whl")
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--target", str(target / "site"), str(wheel)], check=True)
    return target / "site"


@pytest.mark.thorough
def test_the_stages_run_from_a_wheel_in_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    code = "import diffcap, diffcap.utils.settings; print(diffcap.__file__, diffcap.utils.settings.CONFIGS)"
    output = run([sys.executable, "-c", code], tmp_path, PYTHONPATH=str(installed)).stdout.split()
    assert all(path.startswith(str(installed)) for path in output)
    for stage in ("data", "extract", "finetune", "eval"):
        done = run([sys.executable, "-m", "diffcap", stage, *EXPERIMENT], tmp_path, PYTHONPATH=str(installed))
        assert done.returncode == 0, done.stderr
    run_folder = tmp_path / "runs/blocks/scorer"
    assert (run_folder / "eval/metrics.json").is_file()
    images = tmp_path / "data/blocks/official"
    pair = [str(images / "images/CLEVR_default_000000.png"), str(images / "sc_images/CLEVR_semantic_000000.png")]
    words = ["caption", *pair, "--checkpoint", str(run_folder / "finetune/best.ckpt")]
    done = run([sys.executable, "-m", "diffcap", *words], tmp_path, PYTHONPATH=str(installed))
    assert done.returncode == 0 and "log-probability" in done.stdout, done.stderr
