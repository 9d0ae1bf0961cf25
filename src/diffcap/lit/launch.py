"""Find the number of processes that a launcher (torchrun, or SLURM's srun) has started, and check that their states are equal."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from diffcap.utils.errors import DiffcapError

# The store of torch.distributed in which the processes exchange their states. With srun, the first process is the store's server, so
# it keeps the store until it ends.
_stores: list[Any] = []


class Launch(NamedTuple):
    """The launcher's name, the number of hosts, and the number of processes on each host."""

    launcher: str
    hosts: int
    processes: int


def find_launch() -> Launch | None:
    """Return the launcher of this process; None if it was started without one.

    The process of a SLURM batch script, or of a job step with one task, has no launcher. It starts a process for each device itself.
    """
    env = os.environ
    if "TORCHELASTIC_RUN_ID" in env:
        total, hosts, processes = (int(env[name]) for name in ("WORLD_SIZE", "GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE"))
        if total != hosts * processes:
            raise DiffcapError(
                f"torchrun started {total} processes on {hosts} hosts, {processes} of them on this host; give each host the "
                "same --nproc-per-node."
            )
        return Launch("torchrun", hosts, processes)
    if "SLURM_STEP_ID" in env and env.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        tasks = env["SLURM_STEP_TASKS_PER_NODE"]  # "4(x2)": 4 on each of two hosts; "4,3": different numbers
        equal_tasks = re.fullmatch(r"(\d+)(\(x\d+\))?", tasks)
        if equal_tasks is None or env.get("SLURM_NTASKS_PER_NODE") != equal_tasks[1]:
            raise DiffcapError(
                f"srun started {tasks} tasks on the hosts; start the same number on each host with --ntasks-per-node."
            )
        return Launch("srun", int(env["SLURM_STEP_NUM_NODES"]), int(equal_tasks[1]))
    return None


def launcher_options(devices: Any) -> dict[str, Any]:
    """Return options of a Lightning trainer for the processes that a launcher started; `devices` is the number that the user gave, or 1."""
    from lightning.pytorch.plugins.environments import LightningEnvironment, SLURMEnvironment

    launch = find_launch()
    if launch is None:  # else Lightning would treat a SLURM batch script as a process of srun
        return {"plugins": [LightningEnvironment()]} if "SLURM_NTASKS" in os.environ else {}
    if str(devices) not in ("1", "auto", str(launch.processes)):
        raise DiffcapError(
            f"DEVICES={devices}, but {launch.launcher} started {launch.processes} on each host; leave out DEVICES, since the "
            "number of processes comes from the launcher."
        )
    # With `auto_requeue`, Lightning would save a checkpoint in the middle of a step when SLURM signals that it requeues the job.
    plugins = [SLURMEnvironment(auto_requeue=False)] if launch.launcher == "srun" else []
    return {"devices": launch.processes, "num_nodes": launch.hosts, "strategy": "ddp", "plugins": plugins}


def compare_processes(state: str) -> None:
    """Raise an error if the processes of a launcher have different states, because they would then wait for each other forever.

    `state` is a clause about this process, such as "starts from step 0". Each process compares in its first call only. This call waits
    until all other processes have made their first call.
    """
    launch = find_launch()
    if launch is None or _stores:
        return
    from lightning.pytorch.plugins.environments import SLURMEnvironment, TorchElasticEnvironment
    from torch.distributed import rendezvous
    from torch.distributed.elastic.utils.store import get_all

    environment = TorchElasticEnvironment() if launch.launcher == "torchrun" else SLURMEnvironment(auto_requeue=False)
    os.environ |= {"MASTER_ADDR": environment.main_address, "MASTER_PORT": str(environment.main_port)}
    store, rank, count = next(rendezvous("env://", environment.global_rank(), environment.world_size()))
    _stores.append(store)
    store.set(f"diffcap/{rank}", state)
    states = [data.decode() for data in get_all(store, rank, "diffcap/", count)]  # waits for all
    if len(set(states)) > 1:
        examples = "; ".join(f"process {states.index(each)} {each}" for each in dict.fromkeys(states))
        raise DiffcapError(
            f"the processes of {launch.launcher} differ: {examples}. All hosts must see the same data, features and runs; put "
            "their folders on a disk that all hosts share, and run the command again on all hosts."
        )


@contextmanager
def end_together(is_parallel: bool) -> Iterator[None]:
    """Wrap a stage that may run in several processes. If one process of a launcher cannot start the stage, all end with an error.

    `is_parallel` is False for a stage of one process, which is not compared with other processes.
    """
    if not is_parallel or find_launch() is None:
        yield
        return
    try:
        yield
    except (Exception, SystemExit) as error:
        if getattr(error, "code", 1):  # a SystemExit with the code 0 is no error
            with suppress(Exception):  # this process raises `error` below, not that of the comparison
                compare_processes(f"ended with an error ({str(error).rstrip('.')})")
        else:
            compare_processes("has nothing to do")
        raise
    else:
        compare_processes("has nothing to do")
