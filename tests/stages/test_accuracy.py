"""`make accuracy` by its real command, with the stages below it played: what it runs, in which order, what it leaves alone."""

import json
import os
import runpy
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from tests.report.test_comparison import PAIRS, write_run
from tests.test_makefile import play
from tests.toy import captions, write_toy

ROOT = Path(__file__).parents[2]

# What an evaluation writes: better captions for a reinforced captioner.
SCORED = """if stage == "eval":
        import shutil
        shutil.copytree("better/eval" if "reinforce" in value("--checkpoint") else "plain/eval", value("--out"), dirs_exist_ok=True)
        pathlib.Path(value("--out"), "metrics.json").touch()"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with the Makefile, a toy dataset, a virtual environment that only plays, and evaluations for it to hand out."""
    for name in ("configs", "stages", "pyproject.toml", "requirements.lock", "Makefile"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    play(tmp_path, SCORED)
    (tmp_path / ".venv/ready").touch()
    write_toy(tmp_path / "toy", scenes=12)
    wrong = {pair.id: captions(30, False)[0] for pair in PAIRS}
    write_run(tmp_path / "plain", {**wrong, **{pair.id: pair.captions[0] for pair in PAIRS[:8]}})
    write_run(tmp_path / "better", {**wrong, **{pair.id: pair.captions[0] for pair in PAIRS[:20]}})
    return tmp_path


def accuracy(project: Path, *words: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run it; what it said, and the stages' command lines."""
    (project / "log").write_text("")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))}
    command = ["make", "accuracy", "METHOD=scorer", "FOLDER=toy", "PYTHON=false", *words]
    done = subprocess.run(command, cwd=project, env=kept, capture_output=True, text=True, check=False)
    return done, (project / "log").read_text().splitlines()


@pytest.mark.thorough
def test_every_way_of_every_seed_is_in_the_table_and_nothing_is_done_twice(project: Path) -> None:
    words = "SEEDS=1,2", "ARGS=--steps=40 --keep=2 --reinforce_steps=12 --out=runs/here"
    done, ran = accuracy(project, *words)
    assert done.returncode == 0, done.stderr
    counts = {"extract": 1, "finetune": 2, "reinforce": 2, "average": 2, "eval": 11}
    assert Counter(line.split()[0] for line in ran) == counts
    (fine,) = (line for line in ran if line.startswith("finetune") and "runs/here/1/" in line)
    assert fine.endswith(
        "--run.keep_last_k=2 --trainer.max_steps=40 --trainer.val_check_interval=10 --run.checkpoint_every=5"
    )
    (critical,) = (line for line in ran if line.startswith("reinforce") and "runs/here/1/" in line)
    assert critical.endswith("--trainer.max_steps=12 --trainer.val_check_interval=3")
    scored = {line.split("--out ")[1].split()[0]: line for line in ran if line.startswith("eval ")}
    ways = ("eval", "eval-beam5-1", "averaged-eval", "reinforce-eval", "reinforce-eval-beam5-1")
    assert set(scored) == {f"runs/here/{seed}/{way}" for seed in "12" for way in ways} | {"runs/here/ensemble-1-2"}
    assert scored["runs/here/2/reinforce-eval-beam5-1"].endswith("--beams 5 --length_penalty 1.0")
    assert "--checkpoint runs/here/1/averaged/best.ckpt" in scored["runs/here/1/averaged-eval"]
    assert scored["runs/here/ensemble-1-2"].endswith("--ensemble runs/here/2/finetune/best.ckpt")
    table = json.loads((project / "runs/here/report/table.json").read_text())
    assert list(table["rows"])[1:4] == ["beam search, 5 beams", "averaged checkpoints", "reinforced"]
    assert [row["seconds"] for row in list(table["rows"].values())[:5]] == [100, 100, 100, 200, 200]
    assert table["gains"]["reinforced"]["CIDEr-D"]["mean"] > 0.1
    assert "reinforced" in done.stdout and "standard deviation of 2 seeds" in done.stdout

    again, ran = accuracy(project, *words)
    assert again.returncode == 0 and not [line for line in ran if line.split()[0] in ("eval", "average")]
    _, ran = accuracy(project, words[0], words[1].replace("reinforce_steps=12", "reinforce_steps=16"))
    new = {line.split("--out ")[1].split()[0] for line in ran if line.startswith("eval ")}
    assert new == {f"runs/here/{seed}/{way}" for seed in "12" for way in ways[-2:]}


def test_another_number_of_checkpoints_is_another_average(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`make accuracy` with `--keep 5`, then with `--keep 2`."""
    script = runpy.run_path(str(ROOT / "stages/accuracy.py"))
    training, out, ran = tmp_path / "finetune", tmp_path / "averaged/best.ckpt", []
    for name in (*(f"step-{step:06d}.ckpt" for step in range(5)), "last.ckpt"):
        training.mkdir(exist_ok=True)
        (training / name).write_text(name)

    def call(command: list[str], title: str) -> None:
        ran.append([Path(word).name for word in command if word.endswith(".ckpt")][:-1])
        out.parent.mkdir(exist_ok=True)
        out.write_text(str(ran))

    monkeypatch.setitem(script["average"].__globals__, "call", call)
    for keep in (5, 5, 2, 2):
        script["average"]("the average", training, keep, out)
    assert [len(files) for files in ran] == [6, 3] and ran[1] == ["step-000003.ckpt", "step-000004.ckpt", "last.ckpt"]
