"""Train the networks that are part of the package (`make shipped NAME=blocks_backbone`). Each name has its own options."""

import sys
from pathlib import Path
from typing import Literal

from diffcap.registry import import_object
from diffcap.utils.console import run
from diffcap.utils.errors import plain_errors

NETWORKS = {
    "blocks_backbone": "diffcap.worlds.training.blocks:BlocksBackbone",
    "blocks_clip": "diffcap.worlds.training.blocks:BlocksClip",
    "tiles_backbone": "diffcap.worlds.training.tiles:TilesBackbone",
    "tiles_clip": "diffcap.worlds.training.tiles:TilesClip",
}


def captioner(
    world: Literal["blocks", "tiles"] = "blocks",
    pairs: int | None = None,
    steps: int | None = None,
    seed: int = 1234,
    folder: Path | None = None,
    out: Path | None = None,
    shipped: Path | None = None,
) -> None:
    """Render pairs with the variation --jitter 1, extract features, train SCORER+CBR, score the test split, export.

    Args:
        world: Rendered dataset: blocks or tiles.
        pairs: Number of pairs to render; 36,000 of blocks and 12,000 of tiles by default.
        steps: Training steps; 8,000 for blocks and 4,000 for tiles by default.
        seed: Seed of scenes and weights.
        folder: Folder of the dataset; data/<world>-captioner by default.
        out: Folder of the run; runs/captioner-<world> by default.
        shipped: Folder of the exported captioner; in the package by default.
    """
    from diffcap.checkpoints.hub import export
    from diffcap.run_folder import BEST, FINETUNE
    from diffcap.runner import Job, run_job

    default_pairs, default_steps = (36_000, 8_000) if world == "blocks" else (12_000, 4_000)
    out = out or Path(f"runs/captioner-{world}")
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


def main(name: str = "", *words: str) -> None:
    """Run the training with this name. `words` are its options."""
    if name in NETWORKS:
        from diffcap.worlds.training.shipped import train_and_ship

        with plain_errors():
            train_and_ship(name, import_object(NETWORKS[name]), list(words))
    elif name in ("captioner", "tagger"):
        run(captioner if name == "captioner" else import_object("diffcap.worlds.training.tagger:train_tagger"), words)
    else:
        known = ", ".join((*NETWORKS, "captioner", "tagger"))
        sys.exit(f"error: NAME={name} is unknown; give one of {known}.")


if __name__ == "__main__":
    main(*sys.argv[1:])
