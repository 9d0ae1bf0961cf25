"""The learning rate of a decoder on plateaus of the validation score."""

from typing import Any

import lightning.pytorch as pl


class DecoderPlateau(pl.Callback):
    """Lower the learning rate of the optimizer's group "decoder" on plateaus (RSICCformer, authors' code).

    After every third validation in a row without a new best score, the rate is multiplied by a factor, from the next step on.
    The score is the one that selects the best checkpoint; it must exceed 0 to be the first best one.
    """

    def __init__(self, factor: float, validations: int = 3) -> None:
        self.factor, self.validations = factor, validations
        self.best, self.waited = 0.0, 0

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Compare, and change the rate of the optimizer and of its scheduler."""
        checkpoint: Any = trainer.checkpoint_callback
        score = float(trainer.callback_metrics[checkpoint.monitor])
        self.best, self.waited = (score, 0) if score > self.best else (self.best, self.waited + 1)
        if not self.waited or self.waited % self.validations:
            return
        scheduler: Any = trainer.lr_scheduler_configs[0].scheduler
        for index, group in enumerate(trainer.optimizers[0].param_groups):
            if group["name"] == "decoder":
                group["lr"] *= self.factor
                scheduler.base_lrs[index] *= self.factor

    def state_dict(self) -> dict[str, Any]:
        """The state that a resumed run needs; the rates are in the optimizer's and the scheduler's."""
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state."""
        self.best, self.waited = state_dict["best"], state_dict["waited"]
