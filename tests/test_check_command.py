"""`diffcap check`: exit status, regions, JUnit, the page, captions, and the workflow that the documentation shows."""

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import run
from xml.etree import ElementTree

import pytest
import yaml
from PIL import Image, ImageDraw
from tests.commands import ROOT, environment
from tests.preloaded import write_program

from diffcap.cli import main

DOCS = (ROOT / "docs" / "check.md").read_text(encoding="utf-8")


def screenshot(path: Path, button: str = "Save", clock: str = "10:00", size: tuple[int, int] = (400, 200)) -> None:
    image = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(image)
    draw.rectangle((300, 120, 380, 160), (30, 90, 220))
    draw.text((320, 130), button, "white")
    draw.text((330, 10), clock, "black")
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path)


Check = Callable[..., tuple[int, str, str]]


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    """Folders a and b, in which only the clock of clock.png differs, and the region of this clock."""
    for name in ("home.png", "pages/cart.png", "clock.png"):
        screenshot(tmp_path / "a" / name)
        screenshot(tmp_path / "b" / name, clock="11:37" if name == "clock.png" else "10:00")
    region = {"image": "clock.png", "x": 320, "y": 0, "width": 80, "height": 40}
    (tmp_path / "regions.json").write_text(json.dumps([region]))
    return tmp_path


@pytest.fixture
def check(folders: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Check:
    """Run `diffcap check` in the folder; returns its exit status, output and errors."""
    monkeypatch.chdir(folders)

    def command(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop:
            main(["check", *words])
        assert isinstance(stop.value.code, int)
        return stop.value.code, *capsys.readouterr()

    return command


def test_changes_set_the_exit_status(check: Check) -> None:
    same = "same\tclock.png\nsame\thome.png\nsame\tpages/cart.png\n"
    assert check("a", "b", "--ignore", "regions.json") == (0, same, "")
    status, output, _ = check("a", "b", "--json")
    clock = json.loads(output.splitlines()[0])
    left, top, right, bottom = clock["box"]
    assert (status, clock["name"], clock["status"]) == (1, "clock.png", "changed")
    assert 330 <= left < right <= 380 and 10 <= top < bottom <= 30
    assert check("a", "b", "--max_pixels", str(clock["pixels"]))[0] == 0
    assert check("a", "b", "--colour_threshold", "1")[0] == 0
    assert check("a/clock.png", "b/clock.png")[0] == 1


@pytest.mark.slow
def test_a_page_of_30_million_pixels_is_compared_in_all_of_them(folders: Path, check: Check) -> None:
    page = Image.new("RGB", (3000, 10_000), "white")
    page.save(folders / "a.png")
    page.putpixel((2001, 9000), (0, 0, 0))
    page.save(folders / "b.png")
    assert "1 pixel differs in the box (2001, 9000, 2002, 9001)" in check("a.png", "b.png")[1]


def test_missing_files_and_sizes_are_changes_and_broken_files_errors(folders: Path, check: Check) -> None:
    screenshot(folders / "b" / "home.png", size=(400, 190))
    (folders / "b" / "pages" / "cart.png").unlink()
    screenshot(folders / "b" / "new & old.png")
    status, output, _ = check("a", "b", "--ignore", "regions.json", "--junit", "out.xml", "--html", "out.html")
    assert status == 1
    assert "changed\thome.png\tthe sizes differ: 400 x 200 and 400 x 190 pixels" in output
    assert "changed\tnew & old.png\tonly in the folder after" in output
    assert "changed\tpages/cart.png\tonly in the folder before" in output
    suite = ElementTree.parse(folders / "out.xml").getroot()
    assert [suite.get(name) for name in ("tests", "failures", "errors")] == ["4", "3", "0"]
    failed = [(case.get("name"), case[0].tag) for case in suite if len(case)]
    assert failed == [(name, "failure") for name in ("home.png", "new & old.png", "pages/cart.png")]
    html = (folders / "out.html").read_text()
    assert html.count("data:image/webp;base64,") == 4
    assert "new &amp; old.png" in html
    Image.new("1", (8, 8)).save(folders / "one.gif", save_all=True, append_images=[Image.new("1", (8, 8), 1)])
    assert "note: one.gif: has several frames, the first was used.\n" in check("one.gif", "one.gif")[2]
    (folders / "b" / "clock.png").write_bytes(b"broken")
    status, output, _ = check("a", "b", "--junit", "out.xml")
    assert (status, "error\tclock.png\t" in output) == (2, True)
    assert ElementTree.parse(folders / "out.xml").getroot().get("errors") == "1"


@pytest.mark.slow
def test_the_page_has_captions_and_a_box(folders: Path, check: Check) -> None:
    checkpoint = str(ROOT / "src/diffcap/models/captioners/blocks")
    status, output, _ = check("a", "b", "--checkpoint", checkpoint, "--html", "out.html", "--json")
    clock, home, _ = map(json.loads, output.splitlines())
    assert (status, home["caption"], home["changed"]) == (1, None, None)
    assert clock["caption"] and 0 <= clock["changed"] <= 1
    html = (folders / "out.html").read_text()
    assert f'<p class="caption">{clock["caption"]}</p>' in html
    assert "home.png" not in html


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("a", "nothere"), "nothere: not a folder with images (bmp, "),
        (("a", "empty"), "empty: not a folder with images"),
        (("a", "b", "--ignore", "nothere.json"), "nothere.json: no list of regions there"),
        (("a", "b", "--ignore", "partial.json"), "region 1: not a region (Region.__new__() missing 3"),
        (("a", "b", "--ignore", "bad.json"), "bad.json: region 2: not a region (a number is negative); write"),
        (("a", "b", "--colour_threshold", "2"), "--colour_threshold is 2.0; it must be between 0 and 1"),
        (("a", "b", "--max_pixels=-1"), "--max_pixels is -1"),
        (("a", "b", "--checkpoint", "nothere.ckpt"), "nothere.ckpt"),
        (("a", "b", "--junit", "a/home.png/out.xml"), "a/home.png"),
    ],
)
def test_errors_have_the_status_2(folders: Path, check: Check, words: tuple[str, ...], message: str) -> None:
    (folders / "empty").mkdir()
    (folders / "partial.json").write_text('[{"x": 1}]')
    region = {"x": 0, "y": 0, "width": 9, "height": 9}
    (folders / "bad.json").write_text(json.dumps([region, {**region, "y": -1}]))
    status, _, errors = check(*words)
    assert status == 2
    assert message in errors.splitlines()[-1]


@pytest.mark.slow
def test_the_workflow_of_the_documentation(folders: Path) -> None:
    found = re.search(r"```yaml\n(name: screenshots.*?)```", DOCS, re.DOTALL)
    assert found
    steps = yaml.safe_load(found[1])["jobs"]["check"]["steps"]
    script = "\n".join(step["run"] for step in steps if "run" in step)
    shutil.copytree(folders / "a", folders / "screenshots")
    (folders / "bin").mkdir()
    write_program(folders / "bin/diffcap", [sys.executable, "-m", "diffcap"])
    for name, text in {
        "bin/pip": "exit 0",  # diffcap is installed
        "take_screenshots.sh": 'cp -r b "$1"',
    }.items():
        (folders / name).write_text(f"#!/bin/bash\n{text}\n")
        (folders / name).chmod(0o755)
    path = f"{folders / 'bin'}:{environment()['PATH']}"
    for expected in (0, 1):
        done = run(["bash", "-ec", script], cwd=folders, env=environment(PATH=path), capture_output=True, check=False)
        assert done.returncode == expected, done.stderr
        assert (folders / "check.xml").is_file()
        assert (folders / "check.html").is_file()
        shutil.rmtree(folders / "after")
        screenshot(folders / "b" / "home.png", button="Send")
