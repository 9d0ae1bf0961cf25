"""The adaptation stage of CLIP4IDC: sentences find their pairs, pairs their sentences."""

from typing import Any

import torch
from torch import Tensor

from diffcap.data.captioning import AdaptData
from diffcap.errors import DiffcapError
from diffcap.evaluation.retrieval import PairRetrieval
from diffcap.lit.clip_weights import load_clip
from diffcap.lit.schedules import Schedule
from diffcap.lit.training import TrainingModule, adamw, init_from
from diffcap.models.clip4idc import CLIP4IDCAdaptation


class Adaptation(TrainingModule):
    """Trains `CLIP4IDCAdaptation`; validation retrieves among the change pairs of val and all their captions.

    Args:
        captioner: the towers; the stage after takes them over by name.
        lr: AdamW's rate of what the pair adds to CLIP: marks, joint positions, `ln_mid` (paper: 1e-4).
        clip_lr: of the rest of CLIP (authors' code: 1e-7, in half precision; 1e-6 here, as float32 moves differently).
        weight_decay: decoupled (authors' code: 0.2).
        schedule: cosine after the warm-up (in the authors' code it runs from the first step, so that the rate jumps a little
            where the warm-up ends); see `schedules`.
        warmup: steps of rising rate (authors' code: a tenth of all); below 1: a part of the trainer's `max_steps`.
        milestones: of schedules that have them.
        clip_weights: where it starts from: "default" (the package's own for its networks, open_clip's
            download for others), "random", or a file of an open_clip model.
        init_from: checkpoint of an earlier adaptation, in place of `clip_weights`.
    """

    stage = "pretrain"

    def __init__(
        self,
        captioner: CLIP4IDCAdaptation,
        lr: float = 1e-4,
        clip_lr: float = 1e-6,
        weight_decay: float = 0.2,
        schedule: Schedule = "cosine",
        warmup: int | float = 0.1,
        milestones: list[float] | None = None,
        clip_weights: str = "default",
        init_from: str | None = None,
    ) -> None:
        super().__init__(captioner, lr, weight_decay, schedule, warmup, milestones)
        self.captioner: CLIP4IDCAdaptation
        self.clip_lr, self.clip_weights, self.init_from = clip_lr, clip_weights, init_from

    @property
    def pair_data(self) -> AdaptData:
        """The stage's DataModule."""
        data = self.feature_data
        assert isinstance(data, AdaptData)
        return data

    def setup(self, stage: str) -> None:
        """Take CLIP's weights, or an earlier adaptation's."""
        if stage != "fit":
            return
        vocabulary = self.feature_data.vocabulary
        if vocabulary.family != "clip":
            raise DiffcapError(f"data.vocabulary_layout is {vocabulary.layout}; CLIP4IDC needs clip or clip_used.")
        if self.init_from:
            init_from(self.captioner, self.init_from, self.feature_data.words, (), ())
        else:
            load_clip(self.captioner, self.clip_weights, vocabulary)
        self.metric = PairRetrieval()

    def facts(self) -> dict[str, Any]:
        """Method and constructor arguments."""
        return {"method": "clip4idc", "hyperparameters": self.captioner.hyperparameters}

    def optimizer(self) -> torch.optim.Optimizer:
        """AdamW at two rates: what the pair adds, and CLIP (authors' code)."""
        tower, text = self.captioner.images, self.captioner.words
        clip = [*tower.visual.parameters(), *text.parameters(), self.captioner.logit_scale]
        return adamw(self.captioner, clip, self.lr, self.clip_lr, self.weight_decay, (0.9, 0.98))

    def on_train_start(self) -> None:
        """Say where a fresh run begins: the scores before anything was adapted."""
        if self.global_step or not self.trainer.is_global_zero:
            return
        start = PairRetrieval(sync_on_compute=False).to(self.device)
        self.captioner.eval()
        with torch.no_grad():
            for batch in self.pair_data.val_dataloader():
                self._retrieve(start, self.transfer_batch_to_device(batch, self.device, 0))
        self.captioner.train()
        said = "  ".join(f"{name} {float(value):.4f}" for name, value in start.compute().items())
        print(f"step 0 of {self.trainer.max_steps}  val: {said}", flush=True)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """The contrast over the global batch."""
        loss = self.captioner.loss(batch)
        self.log_losses({"contrast": loss}, len(batch["before"]))
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Keep the cosines' scale in bounds; count the time."""
        self.captioner.clamp()
        super().on_train_batch_end(outputs, batch, batch_idx)

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Vectors of pairs and of all their captions."""
        self._retrieve(self.metric, batch)

    def _retrieve(self, metric: PairRetrieval, batch: dict[str, Any]) -> None:
        pairs, texts = self.captioner.pair(batch["before"], batch["after"]), self.captioner.words(batch["texts"])
        metric.update(pairs, batch["number"], texts, batch["text_number"], batch["text_owner"])

    def on_validation_epoch_end(self) -> None:
        """Recall and mean rank over all ranks' pairs: `val/t2p_R@1` and the others."""
        scores = self.metric.compute()
        self.metric.reset()
        values = {f"val/{name}": float(value) for name, value in scores.items()}
        self.log_dict(values, prog_bar=True, rank_zero_only=False)
