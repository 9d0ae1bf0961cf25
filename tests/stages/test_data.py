import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.commands import one_sentence
from tests.datasets.layouts import bird_row, write_clevr_change, write_image

from diffcap.records import read_dataset

STAGE = Path(__file__).parents[2] / "stages/data.py"


def data(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(STAGE), *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, env={**os.environ, "COLUMNS": "200"})


@pytest.fixture
def official(tmp_path: Path) -> Path:
    return write_clevr_change(tmp_path / "official", train=[0, 1, 5], val=[2], test=[7])


def test_clevr_change_with_all_its_images(official: Path, tmp_path: Path) -> None:
    done = data("--dataset", "clevr_change", "--source", official, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "10 pairs, 2.0 captions per pair, 15 images" in done.stdout and "add 2, color 1" in done.stdout
    dataset = read_dataset(tmp_path / "data/clevr_change")
    assert len(dataset.pairs) == 10 and dataset.root == official
    assert dataset.info["splits"]["train"]["distractors"] == 3
    assert dataset.info["skipped"] == {"pairs": 0, "images": 0} and dataset.info["captions_only"] is False
    folder = tmp_path / "data/clevr_change"
    assert sorted(path.name for path in folder.iterdir()) == [
        "checked.json",
        "data.done.json",
        "dataset.json",
        "manifest.jsonl",
        "vocabulary.json",
    ]
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()}
    assert data("--dataset", "clevr_change", "--source", official, cwd=tmp_path).returncode == 0
    assert {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()} == before


def test_missing_and_truncated_images_are_refused_or_skipped(official: Path, tmp_path: Path) -> None:
    command = ["--dataset", "clevr_change", "--source", official, "--out", tmp_path / "out"]
    (official / "sc_images/CLEVR_semantic_000005.png").unlink()
    broken = official / "images/CLEVR_default_000001.png"
    broken.write_bytes(broken.read_bytes()[:150])
    output = one_sentence(data(*command, cwd=tmp_path))
    assert "1 missing (first sc_images/CLEVR_semantic_000005.png) and 1 broken (first images/CLEVR_default" in output
    assert "3 of 10 pairs" in output and "--missing skip" in output
    problems = (tmp_path / "out/problems.txt").read_text().splitlines()
    assert problems[0].startswith("images/CLEVR_default_000001.png\tbroken: ")
    assert problems[1] == "sc_images/CLEVR_semantic_000005.png\tmissing"
    assert not (tmp_path / "out/manifest.jsonl").exists()

    done = data(*command, "--missing", "skip", cwd=tmp_path)
    assert done.returncode == 0 and "3 of 10 pairs are unusable" in done.stdout and "3 pairs skipped" in done.stdout
    dataset = read_dataset(tmp_path / "out")
    assert [one.id for one in dataset.pairs if one.split == "train"] == ["000000.png", "000000.png_n", "000005.png_n"]
    assert dataset.info["skipped"] == {"pairs": 3, "images": 2}

    done = data(*command, "--missing", "skip", "--check", "exists", cwd=tmp_path)
    assert done.returncode == 0 and read_dataset(tmp_path / "out").info["skipped"] == {"pairs": 1, "images": 1}

    shutil.rmtree(official / "images")
    assert "No pair is left" in one_sentence(data(*command, "--missing", "skip", cwd=tmp_path))


def test_birds_without_photos_need_the_explicit_option(tmp_path: Path) -> None:
    source = tmp_path / "birds"
    source.mkdir()
    rows = [bird_row("1", "2", "train", "Animal 1 is red"), bird_row("2", "3", "val", "same")]
    (source / "birds-to-words-v1.0.tsv").write_text("\n".join(rows))
    command = ["--dataset", "birds2words", "--source", source]
    assert "of 3 images 3 missing (first images/1.jpg" in one_sentence(data(*command, cwd=tmp_path))
    done = data(*command, "--captions_only", "true", cwd=tmp_path)
    assert done.returncode == 0 and "images not checked" in done.stdout
    dataset = read_dataset(tmp_path / "data/birds2words")
    assert dataset.info["captions_only"] is True
    assert [pair.captions for pair in dataset.pairs] == [["animal1 is red"], ["same"]]
    for name in ("1.jpg", "2.png", "3.jpg"):
        write_image(source / "images" / name)
    assert data(*command, cwd=tmp_path).returncode == 0
    dataset = read_dataset(tmp_path / "data/birds2words")
    assert dataset.info["captions_only"] is False and dataset.pairs[0].after == "images/2.png"


@pytest.mark.thorough
def test_blocks_are_rendered_and_read_as_clevr_change(tmp_path: Path) -> None:
    command = ["--dataset", "blocks", "--pairs", "30", "--seed", "3", "--jitter", "0.5"]
    done = data(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    dataset = read_dataset(tmp_path / "data/blocks")
    assert len(dataset.pairs) == 30 and dataset.info["root"] == "official"
    assert "holds blocks with other settings (seed)" in one_sentence(data(*command, "--seed", "4", cwd=tmp_path))

    def content() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in (tmp_path / "data/blocks").rglob("*.*") if path.is_file()}

    whole, official = content(), tmp_path / "data/blocks/official"
    (official / "images/CLEVR_default_000003.png").unlink()
    (official / "sc_images/CLEVR_semantic_000009.png").write_bytes(b"broken")
    for name in ("vocabulary.json", "dataset.json"):
        (tmp_path / "data/blocks" / name).write_bytes(b"\xff damaged")
    output = one_sentence(data(*command, cwd=tmp_path))
    assert "1 missing" in output and "1 broken" in output and "Run the same command again" in output
    done = data(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    times = dict.fromkeys((tmp_path / "data/blocks" / name for name in ("checked.json", "data.done.json")), b"")
    # These two hold times of files.
    assert content() | times == whole | times and not (official / ".parts").exists()


@pytest.mark.slow
def test_two_commands_on_one_folder_run_one_after_the_other(tmp_path: Path) -> None:
    command = [sys.executable, str(STAGE), "--dataset", "blocks", "--pairs", "30", "--out", "out"]
    both = [
        subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    notes = sorted(run.communicate(timeout=300)[1] for run in both)
    assert [run.returncode for run in both] == [0, 0], notes
    assert notes == ["", "out: another process prepares this folder; waiting until it ends\n"]
    assert len(read_dataset(tmp_path / "out").pairs) == 30
    assert "is unknown" in one_sentence(data("--dataset", "desc", cwd=tmp_path))
    assert not (tmp_path / "data/desc").exists()


@pytest.mark.parametrize(
    ("arguments", "output"),
    [
        (["--dataset", "clevr_chnge"], "DATASET=clevr_chnge is unknown, did you mean clevr_change; known datasets: "),
        (["--dataset", "desc"], "DATASET=desc is unknown, did you mean desk;"),
        (["--dataset", "desk"], "desk cannot be downloaded; give the folder of its files as DATA="),
        (["--dataset", "clevr_change", "--source", "nowhere"], "nowhere: no such folder"),
        (["--dataset", "desk", "--source", "https://x.org/d.zip"], "https://x.org/d.zip: a URL, not a file or folder"),
        (["--dataset", "desk", "--source", "d.zip"], "d.zip: a file, not a folder; extract it if it is an archive"),
        (["--dataset", "clevr_change", "--source", "."], "splits.json: no splits there"),
        (["--dataset", "clevr_chnage", "--source", "."], "no pairs.jsonl there"),
        (["--dataset", "clevr_change", "--source", ".", "--pairs", "3"], "--pairs is for rendered datasets"),
        (["--dataset", "clevr_change", "--source", ".", "--jitter", "0"], "--jitter is for rendered datasets"),
        (["--dataset", "blocks", "--source", "."], "blocks is rendered and has no source files"),
    ],
)
def test_one_sentence_for_a_wrong_command(tmp_path: Path, arguments: list[str], output: str) -> None:
    (tmp_path / "d.zip").touch()
    (tmp_path / "data/desk").mkdir(parents=True)
    (tmp_path / "data/desk/manifest.jsonl").touch()  # prepared earlier
    assert output in one_sentence(data(*arguments, cwd=tmp_path))
