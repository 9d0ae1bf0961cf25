"""The pre-training stage of IDC-PCL. Each step trains one task: masked words, masked patches, hard negatives or image classes."""

import torch.nn.functional as F
from torch import Tensor

from diffcap.lit.schedules import Schedule
from diffcap.lit.training import TrainingModule, init_from
from diffcap.methods.pcl.model import find_masked_words
from diffcap.methods.pcl.pretraining_model import PCLPretraining
from diffcap.models.captioner import Batch

# Parts of the model that only a stage with the task "fgvc" (classes of birds) has. A checkpoint for `init_from` may have or lack them.
FGVC_HEADS = ("classifier", "matcher")


class Pretraining(TrainingModule):
    """Train `PCLPretraining` on the task of each batch. Fine-tuning starts from the checkpoint of the last step.

    Args:
        captioner: the trunk with its pre-training heads.
        lr: Adam's learning rate, which the schedule multiplies by a factor (paper: 1e-4).
        weight_decay: this number times the weights is added to the gradient (paper: 0).
        schedule: noam (authors' code), piecewise, cosine or constant.
        warmup: number of warm-up steps (authors' code: 8,000 on CLEVR-Change, 4,000 on the birds).
        milestones: steps at which the piecewise schedule halves the rate; a value below 1 is a fraction of the trainer's `max_steps`.
        init_from: checkpoint of an earlier pre-training stage; only its weights are used.
        init_without: parts of the model that keep their own initial weights in spite of `init_from`, such as trunk.pair_encoder
            after a stage with single images.
    """

    stage = "pretrain"

    def __init__(
        self,
        captioner: PCLPretraining,
        lr: float = 1e-4,
        weight_decay: float = 0.0,
        schedule: Schedule = "noam",
        warmup: int | float = 8000,
        milestones: list[float | str] | None = None,
        init_from: str | None = None,
        init_without: list[str] | None = None,
    ) -> None:
        super().__init__(captioner, lr, weight_decay, schedule, warmup, milestones)
        self.captioner: PCLPretraining
        self.init_from = init_from
        self.init_without = init_without or []

    def setup(self, stage: str) -> None:
        """Load the weights of an earlier stage if `init_from` is set."""
        if stage == "fit":
            self.captioner.trunk.position_vectors(0, self.feature_data.max_length)  # raises an error for a short table
            vocabulary_words = self.feature_data.words
            init_from(self.captioner, self.init_from, vocabulary_words, FGVC_HEADS, FGVC_HEADS, self.init_without)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the loss of the batch's task. DDP needs a gradient of every parameter, so parameters of other tasks get zero."""
        task = batch["task"]
        losses = self.captioner.loss(task.removeprefix("single_"), batch)
        loss = losses.pop("loss")
        parts = {f"{task}_{name}": value for name, value in losses.items()}
        self.log_losses({task: loss, **parts}, len(batch["before"]))
        return loss + 0.0 * sum(parameter.sum() for parameter in self.captioner.parameters())

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Add the loss and the accuracy of the masked words in a batch of validation pairs."""

        def mlm_losses(batch: Batch) -> dict[str, Tensor]:
            logits = self.captioner.mlm_logits(batch)
            words = find_masked_words(batch).ids
            losses = F.cross_entropy(logits, words, reduction="none")
            return {"mlm": losses, "mlm_accuracy": (logits.argmax(-1) == words).float()}

        self.add_validation_losses(batch, mlm_losses)
