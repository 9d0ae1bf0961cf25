"""`stages/negatives.py` by its real command: its files, its workers, broken input."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from diffcap.negatives.file import iter_negatives
from diffcap.records import ChangePair, manifest_text, write_text
from diffcap.text.stanza_tagger import SHIPPED_TAGGERS
from diffcap.utils.errors import DiffcapError
from diffcap.worlds.blocks.captions import write_captions
from diffcap.worlds.blocks.scenes import CHANGES, sample_triples

STAGE = Path(__file__).parents[2] / "stages" / "negatives.py"
FILES = ("negatives.jsonl", "negatives.md", "negatives.json", "tags.jsonl")


def write_scenes(folder: Path, count: int) -> Path:
    triples = sample_triples(range(count), seed=1)
    output, unsaid = write_captions(triples, seed=1)
    pairs = []
    for number, (change, one, other) in enumerate(zip(triples.change.tolist(), output, unsaid)):
        image = f"images/{number}.png"
        split = "val" if number % 10 == 9 else "train"
        pairs.append(ChangePair(f"{number}.png", image, f"sc/{number}.png", one, split, CHANGES[change]))
        pairs.append(ChangePair(f"{number}.png_n", image, f"nsc/{number}.png", other, split, None, True))
    write_text(folder / "manifest.jsonl", manifest_text(pairs))
    return folder


def command(folder: Path, *options: str) -> list[str]:
    return [sys.executable, str(STAGE), "--folder", str(folder), "--tagger=blocks", *options]


def run(folder: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, **environment}
    return subprocess.run(command(folder, *options), capture_output=True, text=True, check=False, env=variables)


def test_damaged_files_are_refused_and_made_again(tmp_path: Path) -> None:
    damaged = "negatives.jsonl"
    folder = write_scenes(tmp_path, 20)
    assert run(folder).returncode == 0
    whole = {name: (folder / name).read_bytes() for name in FILES}
    lines = whole[damaged].splitlines(keepends=True)
    (folder / damaged).write_bytes(b"".join(lines[: len(lines) // 2]))
    with pytest.raises(DiffcapError, match=r"`make negatives (DATASET=<name>|FOLDER=.* TAGGER=blocks)`") as error:
        list(iter_negatives(folder / "negatives.jsonl"))
    assert damaged in str(error.value)
    done = run(folder)  # what `make negatives` calls
    assert done.returncode == 0, done.stderr
    assert {name: (folder / name).read_bytes() for name in FILES} == whole


def test_the_files_of_the_training_split(tmp_path: Path) -> None:
    folder = write_scenes(tmp_path, 20)
    done = run(folder, PYTHONHASHSEED="1")
    assert done.returncode == 0, done.stderr
    other = write_scenes(tmp_path / "other", 20)
    assert run(other, PYTHONHASHSEED="2").returncode == 0
    assert all((folder / name).read_bytes() == (other / name).read_bytes() for name in FILES)
    pairs = [json.loads(line) for line in (folder / "manifest.jsonl").read_text().splitlines()]
    train = [(pair["id"], caption) for pair in pairs if pair["split"] == "train" for caption in pair["captions"]]
    rows = list(iter_negatives(folder / "negatives.jsonl"))
    assert [(row.id, row.caption) for row in rows] == train and {len(row.negatives) for row in rows} == {6}
    settings = json.loads((folder / "negatives.json").read_text())["settings"]
    report = (folder / "negatives.md").read_text()
    assert (settings["scope"], settings["replacement"]) == ("pair", "uniform")  # the paper's
    assert (
        "| tagger | blocks |" in report and "## retrieve: 20 examples" in report and "All captions of a pair" in report
    )
    first = (folder / "negatives.jsonl").read_bytes(), (folder / "negatives.jsonl").stat().st_mtime_ns
    again = run(folder)
    assert "nothing to do" in again.stdout
    assert first == ((folder / "negatives.jsonl").read_bytes(), (folder / "negatives.jsonl").stat().st_mtime_ns)
    fewer = run(folder, "--seed=1", "--retrieve=1", "--replace=1", "--confuse=1", "--scope=pair")
    assert fewer.returncode == 0, fewer.stderr
    assert {len(row.negatives) for row in iter_negatives(folder / "negatives.jsonl")} == {3}


def test_workers_go_when_the_stage_is_killed(tmp_path: Path) -> None:
    folder = write_scenes(tmp_path, 700)
    process = subprocess.Popen(
        command(folder, "--workers=2"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    for _ in range(3000):
        if (folder / "tags.jsonl").exists() and (folder / "tags.jsonl").read_bytes().count(b"\n") > 900:
            break
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    for _ in range(1000):
        try:
            os.killpg(process.pid, 0)  # asks only whether the group still has a member
        except ProcessLookupError:
            return
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    raise AssertionError("workers outlived the stage by 20 seconds")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--tagger=nowhere"], "nowhere: no such tagger"),
        (["--split=test"], "no pair of the test split"),
        (["--retrieve=0", "--replace=0", "--confuse=0"], "not all 0"),
        (["--retreive=2"], "retreive"),
        (["--replacement=any"], "replacement"),
    ],
)
def test_bad_input_is_one_sentence(tmp_path: Path, options: list[str], complaint: str) -> None:
    done = run(write_scenes(tmp_path, 2), *options)
    assert done.returncode != 0 and complaint in done.stderr and "Traceback" not in done.stderr


def test_broken_files_are_one_sentence(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == 1 and "no manifest there" in done.stderr and done.stderr.count("\n") == 1
    (tmp_path / "manifest.jsonl").write_text('{"id": \n')
    done = run(tmp_path)
    assert done.returncode == 1 and "line 1" in done.stderr and done.stderr.count("\n") == 1
    write_scenes(tmp_path, 3)
    broken = tmp_path / "tagger"
    broken.mkdir()
    (broken / "resources.json").write_text((SHIPPED_TAGGERS["blocks"] / "resources.json").read_text())
    (broken / "tagger.pt").write_bytes((SHIPPED_TAGGERS["blocks"] / "tagger.pt").read_bytes()[:3000])
    done = run(tmp_path, f"--tagger={broken}")
    assert done.returncode == 1 and "cannot load this tagger" in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "negatives.jsonl").exists()


def test_the_authors_own_are_taken_over(tmp_path: Path) -> None:
    names = [(f"CLEVR_default_{n:06d}", f"CLEVR_semantic_{n:06d}") for n in range(3)]
    pairs = [
        ChangePair(f"{n:06d}.png", f"images/{before}.png", f"sc_images/{after}.png", [f"cube {n}", "gone"], "train")
        for n, (before, after) in enumerate(names)
    ]
    write_text(tmp_path / "manifest.jsonl", manifest_text(pairs))
    rows = [
        {"img1": before, "img2": after, "sentences": [f"cube {n}", "gone"], "neg_samples": list("abcdef")}
        for n, (before, after) in enumerate(names[:2])
    ]
    theirs = tmp_path / "train_neg_tfidf6.json"
    theirs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = run(tmp_path, f"--authors={theirs}")
    assert done.returncode == 0, done.stderr
    found = iter_negatives(tmp_path / "negatives.jsonl")
    assert [(row.id, row.caption) for row in found] == [(pair.id, text) for pair in pairs[:2] for text in pair.captions]
    assert "for 4 of 6 captions" in done.stdout
    assert "authors_sha256" in json.loads((tmp_path / "negatives.json").read_text())["settings"]
    written = (tmp_path / "negatives.jsonl").stat().st_mtime_ns
    assert "nothing to do" in run(tmp_path, f"--authors={theirs}").stdout
    assert (tmp_path / "negatives.jsonl").stat().st_mtime_ns == written
