"""Speed of rendering `tiles` on one core: scenes, images, captions, PNG files.

Command: .venv/bin/python benchmarks/tiles.py --out tiles.json
"""

import tempfile
import time
from pathlib import Path

from diffcap.utils.console import run


def tiles(pairs: int = 320, out: str | None = None) -> None:
    """Render a dataset in a temporary folder and print the pairs per second of processor time and of wall-clock time.

    Args:
        pairs: number of pairs, see `write_tiles`. out: a JSON file for the numbers, too.
    """
    from diffcap.datasets.tiles.write import render_pair, write_tiles
    from diffcap.records import write_json

    render_pair(0)  # computes the textures, once per process
    with tempfile.TemporaryDirectory() as folder:
        begin = time.process_time(), time.perf_counter()
        write_tiles(Path(folder) / "tiles", pairs, workers=1)
        processor, wall = time.process_time() - begin[0], time.perf_counter() - begin[1]
        size = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    numbers = {
        "pairs": pairs,
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
