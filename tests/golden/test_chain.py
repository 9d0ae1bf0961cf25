"""What a command of make runs in an empty folder: stages, their folders, the checkpoint that each one starts from or evaluates.

`chain.txt` holds the answers; a change of structure must leave them as they are. `pytest tests/golden/test_chain.py
--write-golden` writes the file again; git shows what differs.
"""

import difflib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.preloaded import write_program

from diffcap import pipeline, stages
from diffcap.experiment import Experiment
from diffcap.record import flat
from diffcap.stages import Request

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).with_name("chain.txt")
STAGES = ("data", "extract", "negatives", "pretrain", "finetune", "reinforce", "zeroshot", "eval", "report")
# Files that some of the commands find.
FOUND = {
    "runs/blocks/other/pretrain/finished.json": json.dumps({"checkpoint": "last.ckpt", "stage": "pretrain"}),
    "runs/alone/finetune/finished.json": json.dumps({"checkpoint": "best.ckpt", "stage": "finetune"}),
    **{f"data/{name}/manifest.jsonl": "{}" for name in ("cub", "nabirds")},
    **dict.fromkeys(("weights/clip.pt", "weights/resnet.pth"), ""),
    "run.yaml": "dataset: blocks\nmethod: scorer\nseed: 5\nfinetune: {model: {lr: 1.0e-4}}\n",
}


DATA = ("data.folder", "data.singles", "data.labelled", "data.vocabulary_with")  # settings of a training


class Step(NamedTuple):
    """A stage that runs."""

    stage: str
    folder: Path
    checkpoint: str  # that it starts from or evaluates; empty if there is none
    data: list[str]  # the folders of a training
    options: list[str]  # that the user gave to it


def chain(words: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Step]:
    """The stages that `make <words>` runs in a folder. No other function of this test knows how make and stages find them."""
    steps: list[Step] = []
    values = [value for name, equals, value in (word.partition("=") for word in words) if name.endswith("ARGS")]
    given = shlex.split(" ".join(values))

    def note(request: Request) -> None:
        values = flat(request.settings)
        for word in request.words:
            name, _, value = word.removeprefix("--").partition("=")
            values[name] = value
        stage = {"import_features": "extract", "pretrain-extra": "pretrain"}.get(request.stage, request.stage)
        trains = stage in ("pretrain", "finetune", "reinforce")
        found = [values[name] for name in DATA if name in values] if trains else []
        data = sorted({path for value in found for path in (value if isinstance(value, list) else [value])})
        checkpoint = values.get("model.init_from") or values.get("checkpoint", "")
        where = values.get("run.out") or values.get("out") or values.get("folder")
        if request.stage in ("extract", "import_features"):
            place, name = (values.get(f"{group}{key}") for group, key in (("data.", "folder"), ("model.", "name")))
            where = f"{place or values['folder']}/features/{name or values['name']}"
        steps.append(Step(stage, Path(where), checkpoint, data, [word for word in request.words if word in given]))

    def note_missing(command: list[str]) -> None:
        pipeline.run_stage(command[0], command[1:])

    monkeypatch.delenv("WANDB_SWEEP_ID", raising=False)
    monkeypatch.setattr(pipeline, "_run_body", note)
    monkeypatch.setattr(pipeline, "check_options", lambda _: None)
    monkeypatch.setattr(pipeline, "_is_current", lambda *_: False)
    monkeypatch.setattr(pipeline, "run_in_process", note_missing)
    is_made = stages.is_made

    def is_made_or_noted(stage: str, e: Experiment) -> bool:
        where = stages.STAGES[stage].folder(e)
        return is_made(stage, e) or any(
            step.folder == where for step in steps if step.stage in (stage, "pretrain", "extract")
        )

    monkeypatch.setattr(pipeline, "is_made", is_made_or_noted)
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS", "WANDB_"))}
    command = ["make", "-n", *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    for line in filter(lambda line: line != ":", done.stdout.splitlines()):
        program, stage, *options = shlex.split(line)
        assert program == ".venv/bin/diffcap", line
        pipeline.run_stage(stage, options)
    monkeypatch.undo()
    monkeypatch.chdir(folder)
    return steps


def commands() -> list[str]:
    """The commands in `chain.txt`."""
    return re.findall(r"^make .*$", GOLDEN.read_text(encoding="utf-8"), re.MULTILINE)


def described(command: str, steps: list[Step]) -> str:
    """The block of a command in `chain.txt`. Stages are sorted; a stage only has to come after those whose files it reads."""
    lines = [command]
    for step in sorted(steps, key=lambda step: (STAGES.index(step.stage), str(step.folder))):
        data = f" on {' and '.join(step.data)}" if step.data else ""
        read = f" reads {step.checkpoint}" if step.checkpoint else ""
        options = f" with {shlex.join(step.options)}" if step.options else ""
        lines.append(f"  {step.stage} in {step.folder}{data}{read}{options}")
    return "\n".join(lines)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the Makefile, an environment that is ready, and the files of `FOUND`."""
    for name in ("Makefile", "configs", "stages", "pyproject.toml", "requirements.lock"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    write_program(tmp_path / ".venv/bin/diffcap", [sys.executable, "-m", "diffcap"])
    for name, text in FOUND.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / ".venv/ready").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_commands_run_the_golden_chain_of_stages_and_checkpoints(
    folder: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    blocks = []
    for command in commands():
        steps = chain(shlex.split(command)[1:], folder, monkeypatch)
        blocks.append(described(command, steps))
        made = [(folder / name).parent for name in FOUND]
        for step in steps:
            is_hub_or_elsewhere = re.search(r"^/|^[\w-]+/[\w.@-]+$", step.checkpoint)
            if step.checkpoint and not is_hub_or_elsewhere:
                assert (folder / step.checkpoint).parent in made, f"{command}: {step.checkpoint} comes too late"
            made.append(folder / step.folder)
    found = "\n\n".join(blocks) + "\n"
    if request.config.getoption("--write-golden"):
        GOLDEN.write_text(found, encoding="utf-8")
    golden = GOLDEN.read_text(encoding="utf-8")
    if golden != found:
        lines = difflib.unified_diff(golden.splitlines(), found.splitlines(), GOLDEN.name, "today", lineterm="")
        pytest.fail("\n".join(lines), pytrace=False)
