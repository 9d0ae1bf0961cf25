"""The CPU cores that this process may use."""

import os


def available_cores() -> int:
    """Return the number of CPU cores that this process may use. The command taskset, batch systems and containers can restrict it.

    On systems that cannot restrict it, such as macOS, it is the number of the machine's cores.
    """
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
