"""Train the captioner of `blocks` that ships with the package, by the stages that the demo runs, and export it."""

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
    """Render pairs with the camera's full shake, extract, train SCORER+CBR, score it on test, export it.

    Args:
        pairs: to render.
        steps: of the training.
        seed: of scenes and weights.
        folder: of the dataset.
        out: of the run.
        shipped: where the exported captioner goes.
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
