"""The self-critical stage: a fine-tuned captioner, trained on by the CIDEr-D of captions that it draws itself."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from diffcap.errors import DiffcapError
from diffcap.evaluation.metric import CaptionMetric
from diffcap.evaluation.reward import CaptionReward
from diffcap.lit.captioning import Captioning
from diffcap.lit.training import init_from
from diffcap.losses.gather import global_mean
from diffcap.losses.self_critical import Baseline, leave_one_out_mean, self_critical_loss
from diffcap.models.captioner import Captioner
from diffcap.models.generation import greedy_from, sample_from


class Reinforcement(Captioning):
    """Self-critical sequence training (Rennie et al., CVPR 2017) of any `Captioner`, from its fine-tuning's checkpoint.

    Captions are drawn word by word through the captioner's cached `step`; the gradient passes through one teacher-forced pass
    over them. There is no dropout, so that both have the same probabilities.

    Args:
        captioner: the method, built as in its fine-tuning.
        baseline: what a drawn caption's reward is compared with: "greedy", the reward of the greedy caption (paper), or
            "mean", that of the other draws of the pair (Luo, 2020).
        end_counts: the end of a caption counts as a word in the reward, see `CaptionReward`.
        settings: see `Captioning`; `init_from` is best.ckpt of the fine-tuning, which brings CLIP's weights, too.
    """

    stage = "reinforce"

    def __init__(
        self, captioner: Captioner, baseline: Baseline = "greedy", end_counts: bool = True, **settings: Any
    ) -> None:
        super().__init__(captioner, **settings)
        self.baseline, self.end_counts = baseline, end_counts

    def setup(self, stage: str) -> None:
        """Take over the fine-tuned weights; count the training references."""
        if stage != "fit":
            return
        if not self.init_from:
            raise DiffcapError(
                "model.init_from is not set; give best.ckpt of the fine-tuning, which this stage starts from."
            )
        data = self.feature_data
        if self.baseline == "mean" and getattr(data, "draws", 0) < 2:
            raise DiffcapError("model.baseline is mean, but data.draws is 1; draw at least 2, or take baseline greedy.")
        self._check_data()
        init_from(self.captioner, self.init_from, data.words, (), ())
        self._freeze_what_says_nothing()
        self.metric = CaptionMetric(data.val_references, tokenizer=self.tokenizer)
        table = data.train_table
        spelled = (data.vocabulary.decode(row) for row in np.unique(table.tokens, axis=0).tolist())
        words = {word for caption in spelled for word in caption.split(" ")}
        references: dict[str, list[str]] = {id: [] for id in table.ids}
        for number, caption in zip(table.owner, table.captions):
            references[table.ids[number]].append(caption)
        self.reward = CaptionReward(references, sorted(words), self.tokenizer, self.end_counts)

    def _freeze_what_says_nothing(self) -> None:
        """Take out what no word depends on (CBR, projectors): it gets no gradient, for which other processes would wait."""
        table = self.feature_data.train_table
        images, tokens = table.images(np.array([0])), torch.from_numpy(table.tokens[:1]).long()
        self.captioner.eval()
        logits = self.captioner.teacher_forced_logits(tokens, self.captioner.encode(images["before"], images["after"]))
        logits.logsumexp(-1).sum().backward()
        for part in self.captioner.parameters():
            part.requires_grad_(part.grad is not None)
            part.grad = None
        self.captioner.train()

    def on_train_start(self) -> None:
        """Validate what a fresh run begins with: a candidate for best.ckpt, so that it hands over nothing worse than that."""
        if self.global_step:
            return
        trainer: Any = self.trainer
        trainer.validating = True  # as Lightning does itself around a validation between two steps
        trainer.fit_loop.epoch_loop.val_loop.run()
        trainer.training = True

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """Draw captions of each pair, and make those likelier that beat the baseline. Logs both rewards."""
        captioner, draws = self.captioner.eval(), batch["draws"]
        pairs, each, words = draws.shape
        memory = captioner.encode(batch["before"], batch["after"])
        of_each = tree_map(lambda leaf: leaf.repeat_interleave(each, 0), memory)
        tokens = sample_from(captioner, of_each, draws.flatten(0, 1))
        rewards = self.rewards(batch["pair"].repeat_interleave(each), tokens).view(pairs, each)
        if self.baseline == "greedy":
            baseline = self.rewards(batch["pair"], greedy_from(captioner, memory, words + 1))[:, None].expand_as(
                rewards
            )
        else:
            baseline = leave_one_out_mean(rewards)
        logits, advantage = captioner.teacher_forced_logits(tokens, of_each), (rewards - baseline).flatten()
        loss = global_mean(self_critical_loss(logits, tokens, captioner.caption_mask(tokens), advantage))
        self.log_losses({"reward": global_mean(rewards.flatten()), "baseline": global_mean(baseline.flatten())}, pairs)
        return loss

    def rewards(self, pairs: Tensor, tokens: Tensor) -> Tensor:
        """CIDEr-D of captions (B, T) against the references of training pairs, numbers (B,): (B,)."""
        data, ended = self.feature_data, self.captioner.is_eos(tokens[:, 1:]).any(1)
        ids = [data.train_table.ids[number] for number in pairs.tolist()]
        captions = [data.vocabulary.decode(row) for row in tokens.tolist()]
        found = self.reward(ids, captions, ended.tolist())
        return torch.from_numpy(found).to(tokens.device, torch.float32)
