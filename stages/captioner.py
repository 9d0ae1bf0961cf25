"""Train a captioner that ships with the package, of `blocks` or `tiles`, and export it."""

from pathlib import Path
from typing import Literal

from diffcap.utils.console import run


def train(
    world: Literal["blocks", "tiles"] = "blocks",
    pairs: int | None = None,
    steps: int | None = None,
    seed: int = 1234,
    folder: Path | None = None,
    out: Path | None = None,
    shipped: Path | None = None,
) -> None:
    """Render pairs with full jitter, extract features, train SCORER+CBR, score the test split, export.

    Args:
        world: Embedded dataset.
        pairs: Number of pairs to render; 36,000 of blocks and 12,000 of tiles by default.
        steps: Training steps; 8,000 and 4,000 by default.
        seed: Seed of scenes and weights.
        folder: Folder of the dataset; data/<world>-captioner by default.
        out: Folder of the run; runs/captioner or runs/captioner-tiles by default.
        shipped: Folder of the exported captioner; in the package by default.
    """
    from diffcap.checkpoints.exporting import export
    from diffcap.run_folder import BEST, FINETUNE
    from diffcap.runner import Job, run_job

    default_pairs, default_steps = {"blocks": (36_000, 8_000), "tiles": (12_000, 4_000)}[world]
    out = out or Path("runs") / ("captioner" if world == "blocks" else f"captioner-{world}")
    shipped = shipped or Path("src/diffcap/models/captioners") / world
    variables = {
        "dataset": world,
        "method": "scorer",
        "folder": str(folder or f"data/{world}-captioner"),
        "pairs": str(pairs or default_pairs),
        "seed": str(seed),
        "run": str(out),
        "logger": "none",
    }
    run_job(Job("the captioner", variables, finetune=steps or default_steps), data=["--jitter", "1"])
    export(out / FINETUNE / BEST, shipped)
    print(f"{shipped}: the captioner and its scores")


if __name__ == "__main__":
    run(train)
