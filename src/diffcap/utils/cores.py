"""The CPU cores that this process may use."""

import os


def available_cores() -> int:
    """Number of CPU cores that this process may use: fewer than the machine has under taskset, a batch system or a container's CPU set.

    On systems without CPU affinity, the number of the machine's cores.
    """
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
