"""Training of the small networks that ship with the package for `blocks` and `tiles`, on scenes rendered during training."""

from __future__ import annotations

import datetime
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from diffcap.lit.schedules import make_lr_lambda
from diffcap.utils.files import atomic_write

HELD_OUT = 1 << 40  # scenes from this number on are not used in training


class ShippedTraining(pl.LightningModule, ABC):
    """Training of one network."""

    path: ClassVar[Path]  # of the weights in the package

    def __init__(self, lr: float, steps: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr, self.steps = lr, steps

    @staticmethod
    @abstractmethod
    def make(first: int, count: int, seed: int, jitter: float) -> Any:
        """Render the scenes `first` ... `first + count - 1` as a batch."""

    @abstractmethod
    def finish(self, images: int, seed: int, jitter: float) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Return the state dict to write, and scores on a number of held-out scenes."""

    def held_out(self, images: int, seed: int, jitter: float, first: int = HELD_OUT) -> Iterator[Any]:
        """Batches of up to 50 scenes that training does not use."""
        for start in range(0, images, 50):
            yield self.make(first + start, min(50, images - start), seed, jitter)

    def configure_optimizers(self) -> Any:
        """AdamW with a linear warm-up over a tenth of the steps and then a cosine."""
        optimizer = torch.optim.AdamW(self.parameters(), self.lr, weight_decay=0.01)
        lr_lambda = make_lr_lambda("cosine", warmup=max(1, self.steps // 10), total=self.steps)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_lambda)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class RenderedScenes(pl.LightningDataModule):
    """Scenes of an embedded dataset, each of which is rendered and used for one training step only.

    Args:
        batch_size: images per step.
        batches: steps per epoch; an interrupted run continues from the last complete epoch.
        seed: of the scenes.
        jitter: of the images, as in `make data`.
        num_workers: worker processes that render.
    """

    def __init__(
        self, batch_size: int = 64, batches: int = 100, seed: int = 90210, jitter: float = 1.0, num_workers: int = 1
    ) -> None:
        super().__init__()
        self.batch_size, self.batches, self.seed, self.jitter = batch_size, batches, seed, jitter
        self.num_workers = num_workers

    def train_dataloader(self) -> DataLoader[Any]:
        """The scenes of the current epoch; a resumed run gets the same ones as an uninterrupted run."""
        assert self.trainer is not None
        training: Any = self.trainer.lightning_module
        start = self.trainer.current_epoch * self.batches
        numbers: Any = range(start, start + self.batches)
        return DataLoader(
            numbers,
            batch_size=None,
            collate_fn=partial(_make, training.make, self.batch_size, self.seed, self.jitter),
            num_workers=self.num_workers,
            prefetch_factor=4 if self.num_workers else None,
        )


def _make(make: Callable[[int, int, int, float], Any], size: int, seed: int, jitter: float, number: int) -> Any:
    """Render a batch, when it is asked for."""
    return make(number * size, size, seed, jitter)


def standardise_(network: nn.Module, values: list[Tensor]) -> None:
    """Set a backbone's output scaling so that every channel of its unscaled (B, C, h, w) features has mean 0 and variance 1."""
    channels = torch.cat(values).transpose(0, 1).flatten(1).double()
    network.get_buffer("mean").copy_(channels.mean(1))
    network.get_buffer("scale").copy_(channels.std(1).clamp(min=1e-3))


def backbone_state(network: nn.Module) -> dict[str, Tensor]:
    """Weights in float16, the scaling in float32."""
    return {name: value if name in ("mean", "scale") else value.half() for name, value in network.state_dict().items()}


def train_and_ship(name: str, model: type[ShippedTraining], words: list[str]) -> None:
    """Train or resume in runs/embedded/<name>, evaluate, and write the weights with their provenance; `words`: the options."""
    from lightning.pytorch.callbacks import ModelCheckpoint
    from safetensors.torch import save_file

    from diffcap.lit.stage_cli import StageCLI

    class ShippedCLI(StageCLI):
        """Adds options for the path of the weights and the number of held-out scenes."""

        def add_arguments_to_parser(self, parser):  # type: ignore[no-untyped-def]
            """Add the two options."""
            parser.add_argument("--output", type=str, default=str(model.path), help="weights to write, .safetensors")
            parser.add_argument("--probe_images", type=int, default=6000, help="held-out scenes for the evaluation")

    cli = ShippedCLI(
        model,
        RenderedScenes,
        args=words,
        trainer_defaults={
            "accelerator": "auto",
            "devices": 1,
            "logger": False,
            "default_root_dir": f"runs/embedded/{name}",
            "reload_dataloaders_every_n_epochs": 1,
            "enable_model_summary": False,
            "callbacks": [ModelCheckpoint(filename="last", enable_version_counter=False)],
        },
    )
    steps, scenes, images = cli.model.steps, cli.datamodule, cli.config.probe_images
    last = Path(cli.trainer.default_root_dir) / "checkpoints" / "last.ckpt"
    cli.trainer.fit_loop.epoch_loop.max_steps = steps
    cli.trainer.fit(cli.model, datamodule=scenes, ckpt_path=str(last) if last.is_file() else None)
    if cli.trainer.global_step < steps:
        return  # stopped by the user; the same command resumes
    with torch.no_grad():
        state, scores = cli.model.cpu().eval().finish(images, scenes.seed, scenes.jitter)
    options = {f"model.{key}": value for key, value in cli.model.hparams.items() if key[0] != "_"}
    options |= {f"data.{key}": getattr(scenes, key) for key in ("batch_size", "batches", "seed", "jitter")}
    arguments = " ".join(f"--{key}={value}" for key, value in options.items())
    provenance = {
        "date": datetime.date.today().isoformat(),
        "command": f"python stages/shipped.py {name} --seed_everything={cli.config.seed_everything} {arguments}",
        "seed": f"{cli.config.seed_everything} (weights), {scenes.seed} (scenes)",
        "steps": f"{steps} of {scenes.batch_size} images",
        "held_out": json.dumps({**scores, "images": images}),
    }
    output = Path(cli.config.output)
    with atomic_write(output, per_process=False) as temporary:
        save_file({key: value.contiguous() for key, value in state.items()}, temporary, provenance)
        temporary.chmod(0o644)  # safetensors creates a file that only its owner can read
    print(f"{output}: {output.stat().st_size / 1e6:.2f} MB; on held-out scenes: {scores}")
