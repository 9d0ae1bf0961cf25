"""torchrun and srun: the number of processes by their variables, and the stages with two agents of torchrun."""

import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from lightning.pytorch.utilities import rank_zero_only
from tests.commands import environment, in_process, same_logs, weights

from diffcap.lit.decoding import evaluation_trainer
from diffcap.lit.launch import Launch, compare_processes, end_together, find_launch
from diffcap.lit.stage_cli import hide_lightning_messages
from diffcap.run_folder import is_main_process
from diffcap.utils.errors import DiffcapError

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none", "RANK": "3", "LOCAL_RANK": "1", "GROUP_RANK": "1", "WORLD_SIZE": "4",
    "GROUP_WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500",
}  # fmt: skip
JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0",
       "SLURM_NODEID": "0", "SLURM_NODELIST": "localhost"}  # fmt: skip
SRUN = {
    **JOB, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2", "SLURM_NTASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_NTASKS_PER_NODE": "2", "SLURM_PROCID": "3", "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}  # fmt: skip
CHILD = {"LOCAL_RANK": "1", "NODE_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Nothing of the launcher that may have started the tests; what Lightning sets is removed again."""
    monkeypatch.setattr("diffcap.lit.launch._stores", [])
    monkeypatch.setattr(rank_zero_only, "rank", 0)  # a Trainer sets it for all later trainings of the process
    for name in {*TORCHRUN, *SRUN, *CHILD, *(name for name in os.environ if name.startswith("SLURM_"))}:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return monkeypatch


def set_all(variables: pytest.MonkeyPatch, values: dict[str, str]) -> None:
    for name, value in values.items():
        variables.setenv(name, value)


@pytest.mark.parametrize(
    ("values", "launch", "main"),
    [
        ({}, None, True),
        (TORCHRUN, Launch("torchrun", 2, 2), False),
        ({**TORCHRUN, "RANK": "0", "LOCAL_RANK": "0", "SLURM_PROCID": "1"}, Launch("torchrun", 2, 2), True),
        (SRUN, Launch("srun", 2, 2), False),
        ({**SRUN, **TORCHRUN}, Launch("torchrun", 2, 2), False),  # `srun torchrun`
        (JOB, None, True),  # the batch script
        ({**JOB, "SLURM_NTASKS": "2"}, None, True),
        ({**JOB, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1"}, None, True),
        (CHILD, None, False),  # a process that Lightning has started
        ({**CHILD, "LOCAL_RANK": "0", "NODE_RANK": "1"}, None, False),
        ({**CHILD, "RANK": "0"}, None, False),  # started by a process in whose environment RANK is set
        ({"NODE_RANK": "1"}, None, True),  # one process
    ],
)
def test_the_launcher_is_known_by_its_variables(
    variables: pytest.MonkeyPatch, values: dict[str, str], launch: Launch | None, main: bool
) -> None:
    set_all(variables, values)
    assert find_launch() == launch and is_main_process() == main


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "4,3"}, "srun started 4,3 tasks on the hosts; start the same number"),
        ({k: v for k, v in SRUN.items() if k != "SLURM_NTASKS_PER_NODE"}, r"started 2\(x2\) tasks .*ntasks-per-node"),
        ({**TORCHRUN, "WORLD_SIZE": "3"}, "torchrun started 3 processes on 2 hosts, .* same --nproc-per-node"),
    ],
)
def test_different_numbers_of_processes_are_refused(
    variables: pytest.MonkeyPatch, values: dict[str, str], sentence: str
) -> None:
    set_all(variables, values)
    with pytest.raises(DiffcapError, match=sentence):
        find_launch()


@pytest.mark.parametrize(
    ("values", "devices", "world"), [(TORCHRUN, 1, 4), (SRUN, 2, 4), (JOB, 2, 2), ({**JOB, "SLURM_NTASKS": "8"}, 1, 1)]
)
def test_a_trainer_has_the_processes_of_the_launcher(
    variables: pytest.MonkeyPatch, values: dict[str, str], devices: int, world: int
) -> None:
    set_all(variables, values)
    trainer = evaluation_trainer(devices, "cpu")
    assert (trainer.world_size, trainer.is_global_zero) == (world, "RANK" not in values and "STEP" not in str(values))
    for launched in (TORCHRUN, SRUN):
        set_all(variables, launched)
        with pytest.raises(DiffcapError, match=r"DEVICES=4, but .* started 2 on each host; leave out DEVICES"):
            evaluation_trainer(4, "cpu")


def test_a_stage_of_one_process_runs_on_the_first_host_alone(
    variables: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    variables.chdir(tmp_path)
    set_all(variables, TORCHRUN)
    variables.setattr(torch.distributed, "rendezvous", lambda *_: iter([(torch.distributed.HashStore(), 0, 1)]))
    for words in (["data", "--dataset", "blocks"], ["negatives", "--folder", "nowhere"], ["report", "--method", "pcl"]):
        assert in_process([sys.executable, "-m", "diffcap", *words]) is None
    assert not list(tmp_path.iterdir()) and capsys.readouterr().out == ""
    for rank in ("0", "3"):  # all refuse
        variables.setenv("RANK", rank)
        message = in_process([sys.executable, "-m", "diffcap", "finetune", "--dataset", "blocks", "--method", "scorer"])
        assert message == (
            "error: data/blocks/features/blocks: the result of the stage extract is missing, and torchrun cannot start it; first run "
            "`diffcap extract --dataset blocks --method scorer`, without torchrun."
        )


def states(variables: pytest.MonkeyPatch, *others: str) -> None:
    """Torchrun has also started processes with these states."""
    store = torch.distributed.HashStore()
    for number, state in enumerate(others):
        store.set(f"diffcap/{number}", state)
    set_all(variables, TORCHRUN)
    variables.setattr(torch.distributed, "rendezvous", lambda *_: iter([(store, len(others), len(others) + 1)]))


ALL_SEE = "All hosts must see the same data, features and runs; put their folders on a disk that all hosts share"


@pytest.mark.parametrize(
    ("other", "end", "sentence"),
    [
        ("starts from step 4", None, rf"process 0 starts from step 4; process 1 starts from step 0\. {ALL_SEE}"),
        ("has nothing to do", None, "process 0 has nothing to do; process 1 starts from step 0"),
        ("starts from step 0", SystemExit(0), "process 0 starts from step 0; process 1 has nothing to do"),
        ("starts from step 0", DiffcapError("features: gone; extract them."), "^features: gone; extract them.$"),
        ("starts from step 0", KeyError("id"), "^'id'$"),
    ],
)
def test_processes_that_differ_end_with_an_error(
    variables: pytest.MonkeyPatch, other: str, end: BaseException | None, sentence: str
) -> None:
    states(variables, other)
    with pytest.raises((DiffcapError, KeyError), match=sentence), end_together(True):
        if end is not None:
            raise end
        compare_processes("starts from step 0")


@pytest.mark.parametrize("code", [None, 0, 2])
def test_equal_processes_go_on(variables: pytest.MonkeyPatch, code: int | None) -> None:
    with end_together(True):  # without a launcher
        compare_processes("starts from step 0")
    states(variables, "starts from step 0" if code is None else "has nothing to do")
    with pytest.raises(SystemExit) as stop, end_together(True):
        if code is None:
            compare_processes("starts from step 0")
            states(variables, "is not compared a second time")
            compare_processes("decodes")
        sys.exit(code)
    assert stop.value.code == code


def test_lightning_names_the_lost_process_before_it_kills_the_main_one(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("lightning.fabric"), "propagate", True)
    hide_lightning_messages()
    main, lost = subprocess.Popen(["sleep", "60"]), subprocess.Popen(["false"])
    lost.wait()
    assert _ChildProcessObserver(main.pid, [lost])._run()
    assert main.wait() == -signal.SIGKILL
    (error,) = caplog.messages
    assert error.startswith("error: another process of this run has ended") and f"PID {lost.pid} terminated" in error
    assert error.endswith("run the same command again to resume.") and "\n" not in error


STAGE = ("--dataset", "blocks", "--method", "scorer", "--trainer", "smoke", "--logger", "none")
QUICK = ("--metrics", "[BLEU-1, CIDEr-D]")  # without METEOR's Java


def torchrun(words: Sequence[str], *folders: Path) -> list[tuple[int, str, str]]:
    """Exit codes and outputs of two agents on this machine, which run a stage in their folders."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    agents = []
    for rank, folder in enumerate(folders):
        agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
        agent += [f"--node-rank={rank}", "--master-addr=127.0.0.1", f"--master-port={port}", "-m", "diffcap", *words]
        pipe = subprocess.PIPE
        agents.append(subprocess.Popen(agent, cwd=folder, env=environment(), stdout=pipe, stderr=pipe, text=True))
    outputs = [agent.communicate(timeout=300) for agent in agents]
    return [(agent.returncode, *output) for agent, output in zip(agents, outputs)]


@pytest.mark.thorough
def test_two_hosts_train_and_evaluate_as_one(tmp_path: Path) -> None:
    one, two, other = (tmp_path / name for name in ("one", "two", "other"))
    one.mkdir()
    diffcap = [sys.executable, "-m", "diffcap"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(one)
        assert in_process([*diffcap, "data", "--dataset", "blocks", "--pairs", "60"]) is None
        shutil.copytree(one / "data", two / "data")
        for words in (["extract", *STAGE], ["finetune", *STAGE], ["eval", *STAGE, *QUICK]):
            assert in_process([*diffcap, *words]) is None
    store = "data/blocks/features/blocks/features.f16"
    evaluations = []
    for words in (["extract", *STAGE], ["finetune", *STAGE], ["eval", *STAGE, *QUICK]):
        done = torchrun(words, two, two)
        assert [code for code, *_ in done] == [0, 0], done
        evaluations = [output for _, output, _ in done]
    assert (one / store).read_bytes() == (two / store).read_bytes()
    run = "runs/blocks/scorer"
    first, second = (weights(folder / run / "finetune/last.ckpt") for folder in (one, two))
    assert first.keys() == second.keys()
    assert max(float((first[name].double() - second[name].double()).abs().max()) for name in first) < 1e-5
    same_logs(one / run / "finetune", two / run / "finetune")
    for name in ("predictions.json", "references.json", "groups.json"):
        assert (one / run / "eval" / name).read_bytes() == (two / run / "eval" / name).read_bytes()
    assert "BLEU-1" in evaluations[0] and not evaluations[1].strip()

    # The second host does not see the run folder of the first one, where the training is complete.
    shutil.copytree(two / "data", other / "data")
    done = torchrun(["finetune", *STAGE], two, other)
    assert [code for code, *_ in done] == [1, 1], done
    for _, _, error in done:
        assert "the processes of torchrun differ: process 0 has nothing to do; process 1 starts from step 0." in error

    # The first host would resume the training, and the second one does not see the features.
    (two / run / "finetune/finished.json").rename(two / run / "finetune/running.json")
    shutil.rmtree(other / "data/blocks/features")
    done = torchrun(["finetune", *STAGE], two, other)
    assert [code for code, *_ in done] == [1, 1], done
    own = "data/blocks/features/blocks: the result of the stage extract is missing, and torchrun cannot start it"
    assert f"differ: process 0 starts from step 4; process 1 ended with an error ({own}" in done[0][2]
    assert f"error: {own}" in done[1][2] and "differ" not in done[1][2]
