"""Train the captioner of `blocks` that ships with the package, and export it."""

from pathlib import Path

from diffcap.utils.console import run


def train(
    pairs: int = 36_000,
    steps: int = 8_000,
    seed: int = 1234,
    folder: Path = Path("data/blocks-captioner"),
    out: Path = Path("runs/captioner"),
    shipped: Path = Path("src/diffcap/models/captioners/blocks"),
) -> None:
    """Render pairs with full camera jitter, extract features, train SCORER+CBR, score the test split, export.

    Args:
        pairs: Number of pairs to render.
        steps: Training steps.
        seed: Seed of scenes and weights.
        folder: Folder of the dataset.
        out: Folder of the run.
        shipped: Folder of the exported captioner.
    """
    from diffcap.checkpoints.exporting import export
    from diffcap.run_folder import BEST, FINETUNE
    from diffcap.runner import Job, run_job

    variables = {
        "dataset": "blocks",
        "method": "scorer",
        "folder": str(folder),
        "pairs": str(pairs),
        "seed": str(seed),
        "run": str(out),
        "logger": "none",
    }
    run_job(Job("the captioner", variables, finetune=steps), data=["--jitter", "1"])
    export(out / FINETUNE / BEST, shipped)
    print(f"{shipped}: the captioner and its scores")


if __name__ == "__main__":
    run(train)
