"""What several benchmarks use: the machine that they ran on, when two results are equal, and the two files with the results."""

import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

TOLERANCE, BF16_TOLERANCE = 1e-3, 2e-2  # largest relative difference of equal results; bfloat16 has 8 significant bits


def machine() -> dict[str, Any]:
    """The processor, its cores for this process, the system, the date (UTC) and the load."""
    listed = Path("/proc/cpuinfo")
    lines = listed.read_text().splitlines() if listed.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "system": platform.platform(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "load_before": load(),
    }


def load() -> float:
    """Processes that wanted a core in the last minute: what else the machine was doing."""
    return round(os.getloadavg()[0], 2)


def write_results(out: str, info: dict[str, Any], lines: list[str], settings: dict[str, Any], **results: Any) -> None:
    """Write the results as a JSON file and as a Markdown file with `lines` and a description of the machine."""
    from diffcap.records import write_json, write_text
    from diffcap.utils.provenance import provenance

    info, notes, text = {**info, "load_after": load()}, provenance(settings=settings), Path(out).with_suffix(".md")
    write_json(Path(out), {"machine": info, **results, "provenance": notes})
    threads = f"{info['threads']} threads, " if "threads" in info else ""
    end = (
        f"{info['cpu']}, {info['cores']} cores, {threads}torch {notes['versions']['torch']}, load {info['load_before']} before and"
        f" {info['load_after']} after, {info['date']}, commit {notes['commit']}."
    )
    write_text(text, "\n".join([*lines, "", end]) + "\n")
    print(f"{out}, {text.name}")
