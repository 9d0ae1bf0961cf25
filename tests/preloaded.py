"""Commands of Python that start in milliseconds: each one is a fork of a process that has imported the large libraries.

After `install`, `subprocess` starts `python -m module ...`, `python script.py ...` and `python -c code ...` as such forks, in the tests
and in the commands that they start: the second process of a training, the trainings of a sweep, the workers of torchrun. A fork runs the
same code as a new interpreter, and is a child of the process that starts it, with its own folder, environment, output and exit. Programs
such as `.venv/bin/diffcap`, and code that asks what is imported (`sys.modules`), get new interpreters.

`write_program` offers the same to make.
"""

import atexit
import ctypes
import gc
import inspect
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from functools import cache
from pathlib import Path
from typing import Any

PYTHON = sys.executable
# Read when an interpreter starts or a library is imported: a command with another value gets an interpreter of its own.
READ_AT_START = ("OMP_NUM_THREADS", "PYTHONIOENCODING", "LANG", "LC_ALL", "COLUMNS")
# Options of prctl: the name of a process in `ps`; a process whose parent has ended becomes a child of this one.
SET_NAME, SET_CHILD_SUBREAPER = 15, 36
LARGEST = 1 << 18  # bytes of a command with its environment
CLIENT = """#!{python} -IS
import json, os, socket, sys
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
    server.connect({address!r})
    command = dict(args=[*{words!r}, *sys.argv[1:]], cwd=os.getcwd(), env=dict(os.environ))
    socket.send_fds(server, [json.dumps(command).encode()], [0, 1, 2])
    sys.exit(int(server.recv(16)))
"""


def install() -> None:
    """Let `subprocess` start commands of Python as forks, of a process that starts when it is needed first."""
    if sys.platform == "linux":
        _replace_start(cache(_start_server))


def write_program(path: Path, words: list[str]) -> None:
    """Write a program that runs `words` and its own arguments as a fork, with its own folder, environment and output."""
    if sys.platform == "linux":
        text = CLIENT.format(python=PYTHON, address=_listen(), words=words)
    else:
        text = f"#!{PYTHON}\nimport subprocess, sys\nsys.exit(subprocess.call([*{words!r}, *sys.argv[1:]]))\n"
    path.write_text(text)
    path.chmod(0o755)


@cache
def _listen() -> str:
    """The address at which threads of this process run the commands of programs."""
    address = f"\0diffcap-tests-{os.getpid()}"  # no file
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind(address)
    listening.listen()

    def run(connection: socket.socket) -> None:
        message, files, *_ = socket.recv_fds(connection, LARGEST, 3)
        process = subprocess.Popen(**json.loads(message), **dict(zip(("stdin", "stdout", "stderr"), files)))
        for file in files:
            os.close(file)
        status = process.wait()
        connection.send(str(status if status >= 0 else 128 - status).encode())
        connection.close()

    def accept() -> None:
        while True:
            threading.Thread(target=run, args=listening.accept()[:1], daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return address


def _replace_start(server: Any) -> None:
    """Replace the start of a process in `subprocess`; `server()` is the connection to the process that forks."""
    lock, start = threading.Lock(), subprocess.Popen._execute_child  # type: ignore[attr-defined]
    signature, prctl = inspect.signature(start), ctypes.CDLL(None).prctl
    pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")

    def start_or_fork(process: subprocess.Popen, *arguments: Any) -> None:
        given = signature.bind(process, *arguments).arguments
        words = [given["args"]] if isinstance(given["args"], str) else [os.fspath(word) for word in given["args"]]
        environment = dict(os.environ if given["env"] is None else given["env"])
        if not _can_fork(words, environment) or given["preexec_fn"] or given["pass_fds"]:
            start(process, *arguments)
            return
        command = {"words": words, "cwd": os.path.abspath(given["cwd"] or "."), "environment": environment}  # noqa: PTH100
        command |= {name: given[name] for name in ("start_new_session", "process_group")}
        ends = enumerate(given[name] for name in ("p2cread", "c2pwrite", "errwrite"))
        files = [number if end == -1 else end for number, end in ends]  # -1: the file of this process
        with lock:
            prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            socket.send_fds(server(), [json.dumps(command).encode()], files)
            # Its number, and "-" when its first parent has ended, in any order.
            answers = server().recv(16) + server().recv(16)
            process.pid = int(answers.strip(b"-"))
            prctl(SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        process._child_created = True  # type: ignore[attr-defined]
        process._close_pipe_fds(*(given[name] for name in pipes))  # type: ignore[attr-defined]

    subprocess.Popen._execute_child = start_or_fork  # type: ignore[attr-defined]


def _can_fork(words: list[str], environment: dict[str, str]) -> bool:
    """Whether it is a script or a module of this interpreter, and diffcap is the one that is imported here."""
    program = words[2:] if words[1:2] == ["-u"] else words[1:]
    # `python -u -c` is a worker of pytest.
    is_program = bool(program) and (program[0] == "-m" or words[1] == "-c" or program[0].endswith(".py"))
    asks_imports = any("sys.modules" in word for word in program[:2])
    folders = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    has_own = any(Path(folder, "diffcap").is_dir() for folder in folders)
    is_known = words[0] == PYTHON and is_program and not asks_imports and not has_own
    return is_known and all(environment.get(name) == os.environ.get(name) for name in READ_AT_START)


def _start_server() -> socket.socket:
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with its:
        subprocess.Popen([PYTHON, __file__, str(its.fileno())], pass_fds=[its.fileno()])
    return ours


def _forks(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork for each command that arrives; returns in the fork, with the command and its files. Ends when the connection does."""
    while True:
        message, files, *_ = socket.recv_fds(connection, LARGEST, 3)
        if not message:
            os._exit(0)
        parent = os.fork()
        if not parent:
            if os.fork():
                os._exit(0)
            command = json.loads(message)
            if command["start_new_session"]:
                os.setsid()
            elif command["process_group"] >= 0:
                os.setpgid(0, command["process_group"])
            connection.send(str(os.getpid()).encode())
            connection.close()
            return command, files
        os.waitpid(parent, 0)
        connection.send(b"-")
        for file in files:
            os.close(file)


def _serve(connection: socket.socket) -> None:
    """Fork for each command. Each fork has a process that forks for it, which is as new as it is."""
    while True:
        ctypes.CDLL(None).prctl(SET_NAME, b"forks", 0, 0, 0)
        command, files = _forks(connection)
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork():
            its.close()
            _replace_start(lambda connection=ours: connection)
            _run(command, files)
            return
        ours.close()
        for file in files:
            os.close(file)
        connection = its


def _run(command: dict[str, Any], files: list[int]) -> None:
    """Make this process look like a new interpreter of the command, and run it to its end."""
    ctypes.CDLL(None).prctl(SET_NAME, b"python", 0, 0, 0)
    for number, file in enumerate(files):
        os.dup2(file, number)
    for file in files:
        os.close(file)
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    os.chdir(command["cwd"])
    changed = dict(os.environ).items() ^ command["environment"].items()
    if any(name.startswith("HF_") for name, _ in changed):  # these libraries read them when they are imported
        for name in [name for name in sys.modules if name.partition(".")[0] in ("huggingface_hub", "transformers")]:
            del sys.modules[name]
    os.environ.clear()
    os.environ.update(command["environment"])
    tempfile.tempdir = None  # it comes from TMPDIR
    sys.path[1:1] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    words = command["words"][1:]
    if words[0] == "-u":
        sys.stdout.reconfigure(line_buffering=True)
        del words[0]
    try:
        if words[0] == "-m":
            sys.argv, sys.path[0] = words[1:], command["cwd"]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        elif words[0] == "-c":
            sys.argv, sys.path[0] = ["-c", *words[2:]], ""
            exec(compile(words[1], "<string>", "exec", dont_inherit=True), {"__name__": "__main__"})
        else:
            sys.argv, sys.path[0] = words, os.path.dirname(words[0])  # noqa: PTH120
            runpy.run_path(words[0], run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if not isinstance(end.code, int | None):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(status)  # an interpreter's own end would take longer: it deletes the objects of all libraries


if __name__ == "__main__":
    import torch

    import diffcap.lit.run  # noqa: F401

    torch.set_num_threads(1)
    gc.freeze()  # a collection in a fork would copy their memory
    _serve(socket.socket(fileno=int(sys.argv[1])))
