"""Find out how many processes a launcher (torchrun, or srun of SLURM) has started, from its environment variables."""

import os
import re
from typing import Any, NamedTuple

from diffcap.utils.errors import DiffcapError


class Launch(NamedTuple):
    """The launcher's name, the number of hosts, and the number of processes on each host."""

    launcher: str
    hosts: int
    processes: int


def find_launch() -> Launch | None:
    """Return the launcher of this process; None if it was started without one.

    The batch script of a SLURM job has no launcher, nor has a step of one task. There, diffcap itself starts a process for each device.
    """
    env = os.environ
    if "TORCHELASTIC_RUN_ID" in env:
        total, hosts, processes = (int(env[name]) for name in ("WORLD_SIZE", "GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE"))
        if total != hosts * processes:
            raise DiffcapError(
                f"torchrun started {total} processes on {hosts} hosts, {processes} of them on this one; give each host the "
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
    if launch is None:  # Lightning would take a batch script of SLURM for a process of srun
        return {"plugins": [LightningEnvironment()]} if "SLURM_NTASKS" in os.environ else {}
    if str(devices) not in ("1", "auto", str(launch.processes)):
        raise DiffcapError(
            f"DEVICES={devices}, but {launch.launcher} started {launch.processes} on each host; leave out DEVICES, since the "
            "number of processes comes from the launcher."
        )
    # On a signal to requeue the job, Lightning would save a checkpoint in the middle of a step.
    plugins = [SLURMEnvironment(auto_requeue=False)] if launch.launcher == "srun" else []
    return {"devices": launch.processes, "num_nodes": launch.hosts, "strategy": "ddp", "plugins": plugins}
