"""Callbacks for training RSICCformer; its settings list them in `trainer.callbacks`."""

from typing import Any

import lightning.pytorch as pl
from torch import nn
from torch.optim import Optimizer

from diffcap.lit.callbacks import PartCallback
from diffcap.utils.errors import DiffcapError


class ClipDecoderGradients(pl.Callback):
    """Limit the absolute values of the gradients of the decoder and of a ResNet's trained layers to `value` (authors' code)."""

    def __init__(self, value: float) -> None:
        self.value = value

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Clip the gradients of a step."""
        captioner: Any = pl_module.captioner
        clipped = [*captioner.decoder.parameters(), *captioner.pretrained_parameters()]
        nn.utils.clip_grad_value_(clipped, self.value)


class DecoderPlateau(PartCallback):
    """Lower the decoder's learning rate on plateaus (authors' code).

    After every third validation in a row without a new best score, the rate is multiplied by a factor, from the next step on.
    The score is the metric that the option `run.monitor` names. The best score is 0 at first.
    """

    part = "decoder"

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.best = 0.0
        self.waited = 0  # validations without a new best score

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Raise a DiffcapError if no score is monitored."""
        if not getattr(trainer.checkpoint_callback, "monitor", None):
            raise DiffcapError(
                "DecoderPlateau in trainer.callbacks needs run.monitor; set it, for example to val/BLEU-4."
            )

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Change the rate of the optimizer and of its scheduler on a plateau."""
        checkpoint: Any = trainer.checkpoint_callback
        score = float(trainer.callback_metrics[checkpoint.monitor])
        self.best, self.waited = (score, 0) if score > self.best else (self.best, self.waited + 1)
        if not self.waited or self.waited % 3:
            return
        scheduler: Any = trainer.lr_scheduler_configs[0].scheduler
        for index, group in enumerate(trainer.optimizers[0].param_groups):
            if group["name"] == self.part:
                group["lr"] *= self.factor
                scheduler.base_lrs[index] *= self.factor

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs. The optimizer and the scheduler keep the rates themselves."""
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state."""
        self.best = state_dict["best"]
        self.waited = state_dict["waited"]
