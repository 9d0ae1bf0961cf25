"""The adaptation stage of CLIP4IDC, which trains the retrieval of pairs by captions and of captions by pairs."""

from typing import Any

import torch
from torch import Tensor, nn

from diffcap.evaluation.retrieval import PairRetrieval
from diffcap.lit.schedules import Schedule
from diffcap.lit.training import OptimizerFunction, TrainingModule, adamw, init_from
from diffcap.methods.clip4idc.model import CLIP4IDCAdaptation
from diffcap.methods.clip4idc.retrieval import add_to_metric
from diffcap.methods.clip4idc.weights import load_clip
from diffcap.models.captioner import Batch
from diffcap.models.clip import clamp_logit_scale_
from diffcap.utils.errors import DiffcapError


class Adaptation(TrainingModule):
    """Train `CLIP4IDCAdaptation`. Validation computes recall and mean rank on the change pairs of the split and all their captions.

    Args:
        captioner: the image and text towers; fine-tuning loads their weights by name.
        lr: learning rate of the parameters that are added to CLIP: embeddings of before and after, position embeddings of the pair's
            tokens, and the norm `ln_mid` (paper: 1e-4).
        clip_lr: learning rate of CLIP's parameters (authors' code: 1e-7 in half precision, which equals about 3e-6 in float32).
        weight_decay: factor of AdamW's decoupled weight decay (authors' code: 0.2).
        schedule: shape of the learning rate over the steps (authors' code: a cosine that begins at the first step, not after the warm-up).
        warmup: number of warm-up steps (authors' code: a tenth of all steps); below 1, a fraction of the trainer's `max_steps`.
        milestones: steps at which the schedules "piecewise" and "step" decrease the rate.
        initial_weights: CLIP's weights: "default" (those in diffcap if it has them, else open_clip's download), "random", or a file.
        init_from: checkpoint of an earlier adaptation, instead of `initial_weights`.
        optimizer: function that makes the optimizer, with the parameters of `lit.training.adamw`; null: AdamW. The authors'
            optimizer is diffcap.methods.clip4idc.optimizers.bert_adam.
    """

    stage = "pretrain"

    def __init__(
        self,
        captioner: CLIP4IDCAdaptation,
        lr: float = 1e-4,
        clip_lr: float = 3e-6,
        weight_decay: float = 0.2,
        schedule: Schedule = "cosine",
        warmup: int | float = 0.1,
        milestones: list[float | str] | None = None,
        initial_weights: str = "default",
        init_from: str | None = None,
        optimizer: OptimizerFunction | None = None,
    ) -> None:
        super().__init__(captioner, lr, weight_decay, schedule, warmup, milestones)
        self.captioner: CLIP4IDCAdaptation
        self.clip_lr = clip_lr
        self.initial_weights = initial_weights
        self.init_from = init_from
        self.optimizer_function = optimizer or adamw

    def setup(self, stage: str) -> None:
        """Load CLIP's weights, or those of an earlier adaptation."""
        if stage != "fit":
            return
        vocabulary = self.feature_data.vocabulary
        if vocabulary.family != "clip":
            raise DiffcapError(f"data.vocabulary_layout is {vocabulary.layout}; CLIP4IDC needs clip or clip_used.")
        if self.init_from:
            init_from(self.captioner, self.init_from, self.feature_data.words, (), ())
        else:
            load_clip(self.captioner, self.initial_weights, vocabulary)
        self.metric = PairRetrieval()

    def metadata(self) -> dict[str, Any]:
        """Return the method and the model's constructor arguments."""
        return {"method": "clip4idc", "hyperparameters": self.captioner.hyperparameters}

    def optimizer(self) -> torch.optim.Optimizer:
        """Return the optimizer. CLIP's and the added parameters have separate learning rates (authors' code)."""
        rates = (self.lr, self.clip_lr, self.weight_decay)
        return self.optimizer_function(self.captioner, self.gradient_groups()["clip"], *rates, betas=(0.9, 0.98))

    def gradient_groups(self) -> dict[str, list[nn.Parameter]]:
        """Return the parameters in two groups: "clip" are those of CLIP, and "added" those that the method adds to CLIP."""
        model = self.captioner
        clip = [*model.images.visual.parameters(), *model.words.parameters(), model.logit_scale]
        clip_ids = {id(parameter) for parameter in clip}
        return {"clip": clip, "added": [p for p in model.parameters() if id(p) not in clip_ids]}

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Compute and log the contrastive loss over the global batch."""
        loss = self.captioner.loss(batch)
        self.log_losses({"contrast": loss}, len(batch["before"]))
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Limit the scale of the cosines to 100 (authors' code), and add up the training time."""
        clamp_logit_scale_(self.captioner.logit_scale)
        super().on_train_batch_end(outputs, batch, batch_idx)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Add the embeddings of the pairs and of all their captions to the metric: `val/t2p_R@1` (text to pair) and others."""
        add_to_metric(self.metric, self.captioner, batch)
