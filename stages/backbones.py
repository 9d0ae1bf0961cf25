"""Measure the backbones of configs/backbones.yaml on this machine, and write the table of docs/backbones.md."""

import time
from pathlib import Path
from statistics import median

import numpy as np
import torch
from PIL import Image

from diffcap.features.backbones import Backbone
from diffcap.lit.extraction import Extraction
from diffcap.records import write_json, write_text
from diffcap.registry import methods
from diffcap.utils.console import run
from diffcap.utils.provenance import provenance
from diffcap.utils.settings import backbones
from diffcap.utils.table import Cell, Table

DOWNLOADED = ("torchvision", "open_clip", "timm")  # libraries whose networks get random weights


def main(out: Path = Path("docs/backbones"), names: list[str] | None = None, repeats: int = 3) -> None:
    """Write table.json and table.md: size of the features, parameters, and CPU milliseconds per image, on one core.

    Args:
        out: Folder of the table.
        names: Entries to measure; by default all that need no checkpoint and store features.
        repeats: Number of images that are timed, after one that is not; the table has their median.
    """
    torch.set_num_threads(1)
    image = Image.fromarray(np.random.default_rng(0).integers(256, size=(320, 480, 3), dtype=np.uint8))
    rows = {}
    for name, options in backbones().items():
        library = options["library"]
        if (names and name not in names) or library in methods() or options.get("from_files"):
            continue
        weights = "random" if library in DOWNLOADED else "default"
        backbone = Extraction(name, weights=weights, **options).backbone
        height, width = backbone.preprocess(image).shape[1:]
        channels, grid_height, grid_width = backbone.shape()
        values = channels * grid_height * grid_width
        seconds = median([cpu_seconds(backbone, image) for _ in range(repeats + 1)][1:])
        rows[name] = {
            "network": options.get("network", ""),
            "image": f"{height} x {width}",
            "channels": f"{channels:,}",
            "grid": f"{grid_height} x {grid_width}",
            "bytes": f"{values if library == 'pixels' else 2 * values:,}",  # uint8 or float16
            "parameters, M": f"{sum(parameter.numel() for parameter in backbone.parameters()) / 1e6:.1f}",
            "CPU ms": f"{1000 * seconds:,.0f}",
        }
        print(name, rows[name], flush=True)
    columns = list(next(iter(rows.values())))[1:]
    lines = [([name, row["network"]], [Cell(row[column]) for column in columns]) for name, row in rows.items()]
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "table.json", {"rows": rows, "provenance": provenance(repeats=repeats)})
    write_text(out / "table.md", Table(columns, lines, ("BACKBONE", "network")).markdown() + "\n")


@torch.inference_mode()
def cpu_seconds(backbone: Backbone, image: Image.Image) -> float:
    """Return the CPU seconds of one image with its preprocessing, which other programs hardly change."""
    start = time.process_time()
    backbone(backbone.preprocess(image)[None])
    return time.process_time() - start


if __name__ == "__main__":
    run(main)
