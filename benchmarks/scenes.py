"""Time and memory of `diffcap caption --out` on whole 16-bit scenes, each run in a process of its own.

Command: .venv/bin/python benchmarks/scenes.py --out benchmarks/scenes.json
"""

import json
import re
import subprocess
import sys
import tempfile
from itertools import permutations
from pathlib import Path
from typing import Any

from common import machine, write_results

from diffcap.utils.console import run

EXAMPLES = Path(__file__).parents[1] / "examples"
PATCH = 256  # side of an example image in the scene
CHILD = """
import resource, sys, time
begin = time.perf_counter()
from diffcap.cli import main
main(sys.argv[1:])
with open("/proc/self/status") as status:
    peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM:"))
used = resource.getrusage(resource.RUSAGE_SELF)
import json, torch
print(json.dumps({"seconds": time.perf_counter() - begin, "processor_seconds": used.ru_utime + used.ru_stime, "peak_mb": peak / 1000,
    "threads": torch.get_num_threads()}))
"""


def scenes(
    out: str, sizes: list[int] | None = None, every: list[int] | None = None, checkpoint: str = "blocks"
) -> None:
    """Write pairs of scenes, caption them, and write the numbers and a table.

    A scene has 3 bands of 16 bits in deflated blocks of 512 x 512 pixels. The example images, in six orders of their bands, lie on a
    grid of 256 pixels; elsewhere the scene is constant, and identical at both dates.

    Args:
        out: the JSON file. The table has the same name with the suffix .md.
        sizes: sides of the scenes in pixels. every: of each scene, the share of the grid that has an image: 1 is all, n every n-th
            place in x and y. By default a scene of one tile, one of 20,000 pixels with an image at every tenth place, and one of 20,000
            pixels that consists of images.
        checkpoint: the captioner; by default `blocks`, whose images the scenes are made of.
    """
    info, rows = machine(), []
    for size, step in zip(sizes or [256, 20_000, 20_000], every or [1, 10, 1]):
        with tempfile.TemporaryDirectory() as name:
            rows.append(measure(Path(name), size, step, checkpoint))
            print(rows[-1], flush=True)
    info["threads"] = rows[0]["threads"]
    write_results(out, info, table(rows), {"sizes": sizes, "every": every, "checkpoint": checkpoint}, scenes=rows)


def measure(folder: Path, size: int, step: int, checkpoint: str) -> dict[str, Any]:
    """Write one pair and caption it."""
    paths = [write_scene(folder / f"{name}.tif", name, size, step) for name in ("before", "after")]
    words = ["caption", *map(str, paths), "--stretch", "0,100", "--device", "cpu", "--checkpoint", checkpoint]
    words += [word for suffix in ("geojson", "csv", "html") for word in ("--out", str(folder / f"changes.{suffix}"))]
    child = subprocess.run([sys.executable, "-c", CHILD, *words], capture_output=True, text=True, check=False)
    if child.returncode:
        raise SystemExit(child.stderr)
    counts = json.loads((folder / "changes.geojson").read_text())["diffcap"]["tiles"]
    (changes,) = re.findall(r"^([\d,]+) changes?", child.stdout, re.MULTILINE)
    return {
        "size": size,
        "every": step,
        "tiles": counts,
        "captioned": counts["changed"] + counts["unchanged"],
        "changes": int(changes.replace(",", "")),
        **json.loads(child.stdout.splitlines()[-1]),
        "pixels_mb": 2 * 3 * 2 * size**2 / 1e6,
        "files_mb": sum(path.stat().st_size for path in paths) / 1e6,
        "html_mb": (folder / "changes.html").stat().st_size / 1e6,
    }


def write_scene(path: Path, name: str, size: int, step: int) -> Path:
    """Write one date in rows of blocks."""
    import numpy as np
    import rasterio
    from PIL import Image
    from rasterio.transform import from_origin
    from rasterio.windows import Window

    with Image.open(EXAMPLES / f"{name}.png") as image:
        pixels = np.asarray(image.convert("RGB").resize((PATCH, PATCH))).transpose(2, 0, 1).astype(np.uint16) * 40
    orders = [pixels[list(order)] for order in permutations(range(3))]
    places = -(-size // PATCH)
    settings = {"tiled": True, "blockxsize": 512, "blockysize": 512, "compress": "deflate", "zlevel": 1, "predictor": 2}
    place = {"crs": "EPSG:32633", "transform": from_origin(500_000, 5_400_000, 0.5, 0.5)}
    with rasterio.open(
        path, "w", driver="GTiff", width=size, height=size, count=3, dtype="uint16", **settings, **place
    ) as file:
        for top in range(0, places, 2):
            rows = np.full((3, 2 * PATCH, places * PATCH), 5000, np.uint16)
            for row in (top, top + 1):
                for column in range(0, places, step) if row % step == 0 else ():
                    window = rows[:, (row - top) * PATCH :, column * PATCH :]
                    window[:, :PATCH, :PATCH] = orders[(row // step + column // step) % 6]
            height = min(2 * PATCH, size - top * PATCH)
            file.write(rows[:, :height, :size], window=Window(0, top * PATCH, size, height))
    return path


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The numbers in Markdown."""
    lines = [
        "# Whole scenes",
        "",
        "`python benchmarks/scenes.py`: `diffcap caption` with GeoJSON, CSV and map, on the CPU. Two dates, 3 bands of 16 bits; tiles of "
        "256 pixels, overlap 64; batches of 16. The time includes the start of Python and the loading of the captioner.",
        "",
        "| scene, pixels | both dates, GB | tiles | captioned | minutes | processor minutes | peak memory, MB | map, MB |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        lines.append(
            f"| {row['size']:,} x {row['size']:,} | {row['pixels_mb'] / 1000:.2f} | {row['tiles']['all']:,} | {row['captioned']:,} | "
            f"{row['seconds'] / 60:.1f} | {row['processor_seconds'] / 60:.1f} | {row['peak_mb']:,.0f} | {row['html_mb']:.1f} |"
        )
    return lines


if __name__ == "__main__":
    run(scenes)
