"""Training of the small networks that the package ships for `blocks` and `tiles`, on scenes rendered during training."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from diffcap.features.blocks_backbone import HEIGHT, WIDTH
from diffcap.lit.schedules import make_lr_lambda
from diffcap.utils.files import atomic_write

if TYPE_CHECKING:
    from diffcap.worlds.blocks.geometry import Scenes

HELD_OUT = 1 << 40  # scenes from this number on are not used in training


def rendered(numbers: Sequence[int], seed: int, jitter: float) -> tuple[Tensor, Tensor, Scenes]:
    """Render the before images of triples of `blocks` by number.

    Returns:
        Images (B, 3, 96, 128) uint8, the object slot visible in each pixel (B, 96, 128), and the scenes.
    """
    from diffcap.worlds.blocks.render import render
    from diffcap.worlds.blocks.scenes import sample_triples

    scenes = sample_triples(numbers, seed=seed, jitter=jitter).before
    images, slots = render(scenes, (WIDTH, HEIGHT))
    return images, slots, scenes


class _RenderedDataset(Dataset[Any]):
    def __init__(self, make: Callable[[int, int, int, float], Any], first: int, data: RenderedScenes) -> None:
        self.make, self.first, self.batches, self.batch_size = make, first, data.batches, data.batch_size
        self.seed, self.jitter = data.seed, data.jitter

    def __len__(self) -> int:
        return self.batches

    def __getitem__(self, number: int) -> Any:
        return self.make((self.first + number) * self.batch_size, self.batch_size, self.seed, self.jitter)


class RenderedScenes(pl.LightningDataModule):
    """Scenes of an embedded dataset, each of which is rendered and used for one training step only.

    Args:
        batch_size: images per step.
        batches: steps per epoch; an interrupted run continues from the last complete epoch.
        seed: of the scenes.
        jitter: of the images, as in `make data`.
        num_workers: worker processes that render.
    """

    make: Callable[[int, int, int, float], Any]  # from first triple, count, seed and jitter to a batch

    def __init__(
        self, batch_size: int = 64, batches: int = 100, seed: int = 90210, jitter: float = 1.0, num_workers: int = 1
    ) -> None:
        super().__init__()
        self.batch_size, self.batches, self.seed, self.jitter = batch_size, batches, seed, jitter
        self.num_workers = num_workers

    def train_dataloader(self) -> DataLoader[Any]:
        """The scenes of the current epoch; a resumed run gets the same ones as an uninterrupted run."""
        epoch = self.trainer.current_epoch if self.trainer else 0
        data = _RenderedDataset(self.make, epoch * self.batches, self)
        return DataLoader(
            data, batch_size=None, num_workers=self.num_workers, prefetch_factor=4 if self.num_workers else None
        )


def warmed_cosine(parameters: Iterable[nn.Parameter], lr: float, steps: int) -> dict[str, Any]:
    """AdamW with a linear warm-up over a tenth of the steps and then a cosine, in the form that Lightning expects."""
    optimizer = torch.optim.AdamW(parameters, lr, weight_decay=0.01)
    lr_lambda = make_lr_lambda("cosine", warmup=max(1, steps // 10), total=steps)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_lambda)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def train_and_ship(
    stage: str,
    model: type[pl.LightningModule],
    data: type[RenderedScenes],
    shipped: Path,
    finish: Callable[[Any, RenderedScenes, int], tuple[dict[str, Tensor], dict[str, float]]],
) -> None:
    """Parse the command line, train or resume, evaluate, and write the weights with their provenance.

    Args:
        stage: name of the script in stages/, and of the run's folder in runs/embedded.
        model: has an attribute `steps`, the number of training steps. data: of the training.
        shipped: default path of the weights.
        finish: from the trained model, its data and the number of held-out scenes to the state dict to write and scores.
    """
    from lightning.pytorch.callbacks import ModelCheckpoint

    from diffcap.lit.stage_cli import StageCLI

    class ShippedCLI(StageCLI):
        """Adds options for the path of the weights and the number of held-out scenes."""

        def add_arguments_to_parser(self, parser):  # type: ignore[no-untyped-def]
            """Add the two options."""
            parser.add_argument(
                "--output", type=str, default=str(shipped), help="path of the weights to write, .safetensors"
            )
            parser.add_argument(
                "--probe_images", type=int, default=6000, help="number of held-out scenes for the evaluation"
            )

    cli = ShippedCLI(
        model,
        data,
        trainer_defaults={
            "accelerator": "auto",
            "devices": 1,
            "logger": False,
            "default_root_dir": f"runs/embedded/{stage}",
            "reload_dataloaders_every_n_epochs": 1,
            "enable_model_summary": False,
            "callbacks": [ModelCheckpoint(filename="last", enable_version_counter=False)],
        },
    )
    steps, scenes = cli.model.steps, cli.datamodule
    last = Path(cli.trainer.default_root_dir) / "checkpoints" / "last.ckpt"
    cli.trainer.fit_loop.epoch_loop.max_steps = steps
    cli.trainer.fit(cli.model, datamodule=scenes, ckpt_path=str(last) if last.is_file() else None)
    if cli.trainer.global_step < steps:
        return  # stopped by the user; the same command resumes
    state, scores = finish(cli.model.cpu().eval(), scenes, cli.config.probe_images)
    options = {f"model.{name}": value for name, value in cli.model.hparams.items() if name[0] != "_"}
    options |= {f"data.{name}": getattr(scenes, name) for name in ("batch_size", "batches", "seed", "jitter")}
    arguments = " ".join(f"--{name}={value}" for name, value in options.items())
    provenance = {
        "date": datetime.date.today().isoformat(),
        "command": f"python stages/{stage}.py --seed_everything={cli.config.seed_everything} {arguments}",
        "seed": f"{cli.config.seed_everything} (weights), {scenes.seed} (scenes)",
        "steps": f"{steps} of {scenes.batch_size} images",
        "held_out": json.dumps({**scores, "images": cli.config.probe_images}),
    }
    output = Path(cli.config.output)
    write_weights(state, output, provenance)
    print(f"{output}: {output.stat().st_size / 1e6:.2f} MB; on held-out scenes: {scores}")


def write_weights(state: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Write a safetensors file with metadata, atomically."""
    from safetensors.torch import save_file

    with atomic_write(path, per_process=False) as temporary:
        save_file({name: value.contiguous() for name, value in state.items()}, temporary, metadata)
        temporary.chmod(0o644)  # safetensors creates a file that only its owner can read
