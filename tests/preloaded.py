"""An interpreter that has imported the large libraries, and forks for each command: a command starts in milliseconds.

`tests.commands.run` talks to it: one JSON object per line with the command in, its exit status out. The command runs the same
code as in an interpreter of its own, with its own folder, environment, output and exit.
"""

import json
import os
import runpy
import signal
import sys
import time

import lightning.pytorch
import torch
import torchmetrics

import diffcap.lit.run  # noqa: F401

MODULES = (lightning.pytorch, torch, torchmetrics)


def enter(command: dict) -> None:
    """Make this forked process look like a new interpreter of the command, and run it to its end."""
    for number, path in ((0, os.devnull), (1, command["stdout"]), (2, command["stderr"])):
        os.dup2(os.open(path, os.O_RDWR), number)
    os.chdir(command["cwd"])
    os.environ.clear()
    os.environ.update(command["environment"])
    words = command["words"][1:]
    if words[:2] == ["-m", "diffcap"]:
        sys.argv, sys.path[0] = words[1:], command["cwd"]
        runpy.run_module("diffcap", run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = words, os.path.dirname(words[0])  # noqa: PTH120
        runpy.run_path(words[0], run_name="__main__")


def wait(process: int, seconds: float) -> int | None:
    """The exit status of a process; None after so many seconds, when it is killed."""
    end = time.monotonic() + seconds
    pause = 0.001
    while time.monotonic() < end:
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return None


def main() -> None:
    """Serve commands until the end of the input."""
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        command = json.loads(line)
        process = os.fork()
        if process == 0:
            enter(command)
            return
        answers.write(f"{json.dumps(wait(process, command['timeout']))}\n")
        answers.flush()


if __name__ == "__main__":
    main()
