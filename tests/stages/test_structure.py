"""How many functions a training calls before its first step, and how deep it is in them there."""

import json
import sys
from pathlib import Path

from tests.commands import run
from tests.stages.small_runs import SETTINGS, SMALL

# The modules between the command and Lightning. Those of the model, of the data and of their files are not counted.
ORCHESTRATION = (
    *("cli", "compose", "experiment", "pipeline", "stages", "record", "run_folder"),
    *("lit/run", "lit/stage_cli", "lit/launch"),
)
COUNTING = """
import json, os, sys
import diffcap
from diffcap.cli import main

FOLDER = os.path.dirname(diffcap.__file__) + "/"
functions = set()

def count(frame, event, _):
    code = frame.f_code
    if event != "call" or not code.co_filename.startswith(FOLDER):
        return
    is_body = not code.co_flags & 1  # of a module or class
    if not is_body and not code.co_name.startswith("<"):  # lambda, comprehension
        functions.add((code.co_filename[len(FOLDER):].removesuffix(".py"), code.co_qualname))
    if code.co_name == "training_step":
        frames = []
        while frame:
            frames.append(frame.f_code.co_filename)
            frame = frame.f_back
        depth = sum(file.startswith(FOLDER) for file in frames)
        print("counted", json.dumps([sorted(functions), depth]), flush=True)
        os._exit(0)

sys.setprofile(count)
main()
"""


def test_few_functions_are_called_before_the_first_step(blocks: Path, undisturbed: Path, tmp_path: Path) -> None:
    program = tmp_path / "counting.py"
    program.write_text(COUNTING)
    folders = f"--folder={blocks}", f"--run={tmp_path / 'run'}", f"--pretraining={undisturbed / 'pretrain'}"
    variables = "--dataset=blocks", "--method=pcl", "--logger=none", *folders
    options = *SMALL, *SETTINGS["finetune"], "--model.captioner.init_args.cross_layers=3"  # as in the pre-training
    words = [sys.executable, str(program), "finetune", *variables, "--", *options]
    done = run(words, tmp_path)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("counted ")]
    functions, depth = json.loads(line.removeprefix("counted "))
    counted = [name for module, name in functions if module in ORCHESTRATION]
    assert "run_stage" in counted and len(counted) <= 50, " ".join(counted)
    assert depth <= 8
