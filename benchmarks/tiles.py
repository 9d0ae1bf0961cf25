"""Speed of rendering `tiles`: scenes, images, captions, PNG files.

Command: .venv/bin/python benchmarks/tiles.py --out benchmarks/tiles.json
"""

import os
import tempfile
import time
from pathlib import Path
from typing import Any

from common import load, machine

from diffcap.utils.console import run


def processor_time() -> float:
    """Seconds of processor time of this process and of its finished children."""
    return sum(os.times()[:4])


def tiles(out: str = "benchmarks/tiles.json", pairs: int = 4_000, workers: int = 2) -> None:
    """Render a dataset in a temporary folder, and write the pairs per second and the processor time of a pair.

    Both include the start of the processes.

    Args:
        out: the JSON file. The table has the same name with the suffix .md.
        pairs: number of pairs.
        workers: number of processes, see `write_tiles`.
    """
    from diffcap.records import write_json, write_text
    from diffcap.utils.provenance import provenance
    from diffcap.worlds.tiles.write import write_tiles

    info = {**machine(), "load_before": load()}
    with tempfile.TemporaryDirectory(prefix="diffcap-tiles-") as folder:
        begin = processor_time(), time.perf_counter()
        write_tiles(Path(folder) / "tiles", pairs, workers=workers)
        processor, wall = processor_time() - begin[0], time.perf_counter() - begin[1]
        size = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    info["load_after"] = load()
    row = {
        "pairs": pairs,
        "workers": workers,
        "pairs_per_second": round(pairs / wall, 1),
        "processor_ms_per_pair": round(1000 * processor / pairs, 2),
        "kilobytes_per_pair": round(size / pairs / 1000, 1),
    }
    notes = provenance(settings={"pairs": pairs, "workers": workers})
    write_json(out, {"machine": info, "tiles": row, "provenance": notes})
    write_text(Path(out).with_suffix(".md"), table(row, info, notes))
    print(Path(out).with_suffix(".md").read_text(encoding="utf-8"))


def table(row: dict[str, Any], info: dict[str, Any], notes: dict[str, Any]) -> str:
    """The numbers in Markdown."""
    return (
        "# Rendering of tiles\n\n"
        "`python benchmarks/tiles.py`: `write_tiles` with all files. The times include the start of the processes.\n\n"
        "| pairs | processes | pairs per second | processor time per pair, ms | files per pair, kB |\n"
        "|--:|--:|--:|--:|--:|\n"
        f"| {row['pairs']:,} | {row['workers']} | {row['pairs_per_second']} | {row['processor_ms_per_pair']} | "
        f"{row['kilobytes_per_pair']} |\n\n"
        f"{info['cpu']}, {info['cores']} cores, load {info['load_before']} before and {info['load_after']} after, {info['date']}, "
        f"commit {notes['commit']}.\n"
    )


if __name__ == "__main__":
    run(tiles)
