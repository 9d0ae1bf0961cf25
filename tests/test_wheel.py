"""The wheel, installed where there is no checkout: all stages run in an empty folder. The packages that it needs are pinned."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.markers import Marker, default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
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


@pytest.mark.parametrize("python", ["3.11.0", "3.12.0", "3.13.0"])
def test_the_lock_file_pins_what_the_package_and_its_extras_need(python: str) -> None:
    """A change of pyproject.toml without `make lock` fails here."""
    pins: dict[str, list[str]] = {}
    here = {**default_environment(), "python_version": python[:4], "python_full_version": python}
    lock = (ROOT / "requirements.lock").read_text()
    for name, version, marker in re.findall(
        r"^([\w.-]+)==(\S+)(?: ; (.*?))? \\\n    --hash=sha256:", lock, re.MULTILINE
    ):
        if not marker or Marker(marker).evaluate(here):
            pins.setdefault(name, []).append(version)
    assert len(pins) > 150 and all(len(versions) == 1 for versions in pins.values())
    assert len(re.findall(r"^\w", lock, re.MULTILINE)) == len(
        re.findall(r"==.* \\\n    --hash", lock)
    )  # each has hashes
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = [*project["project"]["dependencies"], *project["dependency-groups"]["setup"]]
    for extra in ("web", "vlm", "geo", "dev", "docs", "browser", "tiff"):
        wanted += project["project"]["optional-dependencies"][extra]
    for requirement in map(Requirement, wanted):
        if requirement.name != "diffcap":
            (version,) = pins[canonicalize_name(requirement.name)]
            assert requirement.specifier.contains(version, prereleases=True), requirement
    assert "://" not in lock and not re.search(r" /\w", lock)  # no index and no path of one machine
