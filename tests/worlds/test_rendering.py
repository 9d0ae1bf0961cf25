"""What the folders of both embedded datasets have in common: equal bytes, resuming, and what is refused."""

import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diffcap.utils.errors import DiffcapError
from diffcap.worlds.blocks.write import write_blocks
from diffcap.worlds.tiles.write import write_tiles

WRITE: dict[str, Callable[..., None]] = {"blocks": write_blocks, "tiles": write_tiles}
SETTINGS: dict[str, Any] = {"pairs": 64, "seed": 5}


def hashes(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def times(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.fixture(scope="module", params=WRITE)
def rendered(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp(request.param) / "official"
    WRITE[request.param](folder, **SETTINGS, workers=1)
    return request.param, folder


@pytest.mark.slow
def test_same_bytes_with_several_workers(rendered: tuple[str, Path], tmp_path: Path) -> None:
    name, folder = rendered
    WRITE[name](tmp_path / "two", **SETTINGS, workers=2)
    assert hashes(tmp_path / "two") == hashes(folder)


def test_a_finished_folder_is_left_alone_and_one_of_other_settings_refused(rendered: tuple[str, Path]) -> None:
    name, folder = rendered
    before = times(folder)
    WRITE[name](folder, **SETTINGS)
    for other in ({"seed": 6}, {"pairs": 80}, {"jitter": 0.5}):
        fault = rf"holds {name} with other settings \({next(iter(other))}\); choose another folder"
        with pytest.raises(DiffcapError, match=fault):
            WRITE[name](folder, **{**SETTINGS, **other})
    assert times(folder) == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "pairs", "images"),
    [
        pytest.param("blocks", 640, "nsc_images/*.png", marks=pytest.mark.thorough),
        ("tiles", 64, "images/*/label/*.png"),
    ],
)
def test_a_killed_run_goes_on_where_it_stopped_and_ends_with_the_same_bytes(
    name: str, pairs: int, images: str, tmp_path: Path
) -> None:
    broken, whole = tmp_path / "broken", tmp_path / "whole"
    code = (
        f"from diffcap.worlds.{name}.write import write_{name} as write; write({str(broken)!r}, {pairs}, 9, workers=1)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "OMP_NUM_THREADS": "1"})
    while len(list(broken.glob(images))) < 20:
        assert process.poll() is None
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = {path: time for path, time in times(broken).items() if path.suffix == ".png"}
    assert {path.name for path in broken.glob("*.json")} == {f"{name}.json"}
    for folder in (broken, whole):
        WRITE[name](folder, pairs=pairs, seed=9, workers=1)
    assert kept.items() <= times(broken).items() and len(kept) < len(list(broken.rglob("*.png")))
    assert hashes(broken) == hashes(whole)


@pytest.mark.parametrize(
    ("name", "settings", "fault"),
    [
        ("blocks", {"pairs": 31}, "even number"),
        ("blocks", {"pairs": 8}, "30 or more"),
        ("blocks", {"size": (32, 24)}, "64 x 48"),
        ("blocks", {"jitter": -1}, "0 to 3"),
        ("tiles", {"pairs": 46}, "48 or more, not 46"),
        ("tiles", {"pairs": 49}, "even"),
        ("tiles", {"jitter": 1.5}, "0 to 1, not 1.5"),
    ],
)
def test_an_invalid_setting_is_one_sentence(tmp_path: Path, name: str, settings: dict[str, Any], fault: str) -> None:
    with pytest.raises(DiffcapError, match=fault):
        WRITE[name](tmp_path / "new", **settings)
    assert not (tmp_path / "new").exists()


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear reader")
    with pytest.raises(DiffcapError, match="holds files that are not of blocks"):
        write_blocks(tmp_path, pairs=30)
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]
