"""What the README shows is there, and what it tells one to write works."""

import re
import subprocess
import sys
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_picture_is_there_and_nothing_is_left_to_fill_in() -> None:
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", README)
    assert pictures
    for picture in pictures:
        with Image.open(ROOT / picture) as image:
            image.verify()
    assert "@@" not in README


def test_its_tables_are_those_of_the_files_that_commands_wrote() -> None:
    tables = re.findall(r"<!-- table: (\S+) -->\n(.*?)\n<!-- end -->", README, re.DOTALL)
    assert len(tables) == README.count("<!-- table:") > 0
    for path, table in tables:
        assert table in (ROOT / path).read_text(encoding="utf-8"), path


def test_every_make_target_that_it_names_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))
    for line in re.findall(r"^make ([^#\n]+)", README, re.MULTILINE):
        for word in line.split():
            if re.fullmatch(r"[a-z]+", word):
                assert word in targets, line


def test_the_example_of_ones_own_pairs_works(tmp_path: Path) -> None:
    lines = re.findall(r'^\{"before".*\}$', README, re.MULTILINE)
    assert len(lines) >= 3
    folder = tmp_path / "desk"
    for name in re.findall(r'"((?:before|after)/[^"]+)"', "\n".join(lines)):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(folder / name)
    (folder / "pairs.jsonl").write_text("\n".join(lines) + "\n")
    command = [
        sys.executable,
        ROOT / "stages" / "data.py",
        "--dataset",
        "desk",
        "--source",
        folder,
        "--out",
        tmp_path / "out",
    ]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "manifest.jsonl").read_text().count("\n") == len(lines)
