"""Speed of rendering `tiles`: scenes, images, captions, PNG files.

Command: .venv/bin/python benchmarks/tiles.py --out benchmarks/tiles.json
"""

import os
import tempfile
import time
from pathlib import Path

from diffcap.utils.console import run


def processor_time() -> float:
    """Seconds of processor time of this process and of its finished children."""
    return sum(os.times()[:4])


def tiles(pairs: int = 2_000, workers: int = 2, out: str | None = None) -> None:
    """Render a dataset in a temporary folder and print the pairs per second of processor time and of wall-clock time.

    Args:
        pairs: number of pairs. workers: processes, see `write_tiles`. out: a JSON file for the numbers, too.
    """
    from diffcap.datasets.tiles.write import write_tiles
    from diffcap.records import write_json

    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        begin = processor_time(), time.perf_counter()
        write_tiles(Path(folder) / "tiles", pairs, workers=workers)
        processor, wall = processor_time() - begin[0], time.perf_counter() - begin[1]
        size = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    numbers = {
        "pairs": pairs,
        "workers": workers,
        "load_before": round(load, 2),
        "milliseconds_per_pair": round(1000 * processor / pairs, 2),
        "pairs_per_core_second": round(pairs / processor, 1),
        "pairs_per_second": round(pairs / wall, 1),
        "kilobytes_per_pair": round(size / pairs / 1000, 1),
    }
    print("\n".join(f"{name.replace('_', ' ')}: {value:,}" for name, value in numbers.items()))
    if out:
        write_json(out, numbers)


if __name__ == "__main__":
    run(tiles)
