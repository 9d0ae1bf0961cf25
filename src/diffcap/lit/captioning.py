"""The captioning stage: any captioner, trained on captions, selected by the captions it writes."""

from typing import Any, Literal

import torch
from torch import Tensor

from diffcap.errors import DiffcapError
from diffcap.evaluation.metric import CaptionMetric
from diffcap.lit.clip_weights import load_clip
from diffcap.lit.schedules import Schedule
from diffcap.lit.training import TrainingModule, adamw, init_from
from diffcap.methods import method_of
from diffcap.models.captioner import Captioner
from diffcap.models.clip4idc import CLIP4IDC
from diffcap.models.generation import greedy


class Captioning(TrainingModule):
    """Fine-tunes a `Captioner`; validation decodes greedily and scores with the dataset's metrics.

    Args:
        captioner: the method.
        lr: Adam's learning rate before the schedule (IDC-PCL: 3e-5).
        weight_decay: L2 in the gradient (IDC-PCL: 0 on CLEVR-Change, 1e-4 on the birds); with `pretrained_lr` decoupled.
        schedule: piecewise (IDC-PCL, authors' code), step (SCORER, DIRL), linear (CLIP4IDC), noam, cosine or constant; see
            `schedules`.
        warmup: steps of rising rate; below 1: a part of the trainer's `max_steps`.
        milestones: steps at which the rate falls (null: 10,000 and 20,000, IDC-PCL's authors' code); below 1: parts of
            the trainer's `max_steps`.
        init_from: checkpoint of the pre-training stage.
        tokenizer: of the scores in validation: PTB, or raw as IDC-PCL has it.
        pretrained_lr: rate of what comes trained into this stage, CLIP in CLIP4IDC; null: as the rest.
        clip_weights: of CLIP, for a CLIP4IDC that starts from no adaptation: default, random, or a file.
    """

    stage = "finetune"

    def __init__(
        self,
        captioner: Captioner,
        lr: float = 3e-5,
        weight_decay: float = 0.0,
        schedule: Schedule = "piecewise",
        warmup: int | float = 0,
        milestones: list[float] | None = None,
        init_from: str | None = None,
        tokenizer: Literal["ptb", "raw"] = "ptb",
        pretrained_lr: float | None = None,
        clip_weights: str | None = None,
    ) -> None:
        super().__init__(captioner, lr, weight_decay, schedule, warmup, milestones)
        self.captioner: Captioner
        self.init_from, self.tokenizer = init_from, tokenizer
        self.pretrained_lr, self.clip_weights = pretrained_lr, clip_weights

    def optimizer(self) -> torch.optim.Optimizer:
        """Adam; for a captioner with parts that came trained AdamW at two rates."""
        if self.pretrained_lr is None:
            return super().optimizer()
        trained, betas = self.captioner.pretrained_parameters(), (0.9, 0.999)
        return adamw(self.captioner, trained, self.lr, self.pretrained_lr, self.weight_decay, betas)

    def setup(self, stage: str) -> None:
        """Take over the pre-training's weights; prepare the references."""
        if stage != "fit":
            return
        self._check_data()
        if self.init_from:
            captioner = self.captioner
            init_from(
                captioner,
                self.init_from,
                self.feature_data.words,
                captioner.allowed_missing,
                captioner.allowed_unexpected,
            )
        elif self.clip_weights:
            if not isinstance(self.captioner, CLIP4IDC):
                raise DiffcapError(f"model.clip_weights is for CLIP4IDC; {type(self.captioner).__name__} has no CLIP.")
            load_clip(self.captioner, self.clip_weights, self.feature_data.vocabulary)
        self.metric = CaptionMetric(self.feature_data.val_references, tokenizer=self.tokenizer)

    def _check_data(self) -> None:
        method_of(type(self.captioner))  # before the training, which could not save its checkpoints
        data, method = self.feature_data, type(self.captioner).__name__
        if data.vocabulary.family != self.captioner.vocabulary_layout:
            needed = self.captioner.vocabulary_layout
            raise DiffcapError(f"data.vocabulary_layout is {data.vocabulary.layout}; {method} needs {needed}.")

    def facts(self) -> dict[str, Any]:
        """Method and constructor arguments."""
        return {
            "method": method_of(type(self.captioner)),
            "hyperparameters": self.captioner.hyperparameters,
            "tokenizer": self.tokenizer,
        }

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """The captioner's own loss."""
        parts = self.captioner.loss(batch)
        self.log_losses(parts, len(batch["before"]))
        return parts["loss"]

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Decode; the loss is of each pair's first caption."""
        self.add_validation_losses(batch, self.captioner.validate)
        tokens = greedy(self.captioner, batch["before"], batch["after"], self.feature_data.max_length)
        self.metric.update(batch["id"], [self.feature_data.vocabulary.decode(row) for row in tokens])

    def on_validation_epoch_end(self) -> None:
        """Log the losses, and the scores of all captions of all ranks: `val/CIDEr-D` and the other fast metrics."""
        self.log_validation_losses()
        scores = self.metric.compute()
        self.metric.reset()
        self.log_dict(
            {f"val/{name}": float(value) for name, value in scores.items()}, prog_bar=True, rank_zero_only=False
        )
