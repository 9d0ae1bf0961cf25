"""What several benchmarks use: the machine that they ran on, what else it was doing, and when two results are equal."""

import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

TOLERANCE, BF16_TOLERANCE = 1e-3, 2e-2  # largest relative difference of equal results; bfloat16 has 8 significant bits


def machine() -> dict[str, Any]:
    """The processor, its cores for this process, the system and the date (UTC)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return {"cpu": processor(), "cores": cores, "system": platform.platform(), "date": date}


def processor() -> str:
    """The processor's name, from Linux's own list where there is one."""
    listed = Path("/proc/cpuinfo")
    lines = listed.read_text().splitlines() if listed.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def load() -> float:
    """Processes that wanted a core in the last minute: what else the machine was doing."""
    return round(os.getloadavg()[0], 2)
