"""The reinforcement stage, which trains a fine-tuned captioner. The reward is the CIDEr-D of captions that the captioner samples."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from diffcap.data.pair_table import maps_as_float
from diffcap.evaluation.metric import CaptionReward
from diffcap.lit.finetuning import Captioning
from diffcap.lit.training import init_from
from diffcap.losses.gather import global_mean
from diffcap.losses.self_critical import Baseline, leave_one_out_mean, self_critical_loss
from diffcap.models.captioner import Batch, Captioner
from diffcap.models.generation import greedy, sample_from
from diffcap.utils.errors import DiffcapError


class Reinforcement(Captioning):
    """Self-critical sequence training (Rennie et al., CVPR 2017) of any `Captioner`, starting from its fine-tuned checkpoint.

    Captions are sampled word by word with the captioner's `step`, which caches earlier words. The gradient comes from one teacher-forced
    pass over the sampled captions. Dropout is off, so that sampling and teacher forcing compute the same probabilities.

    Args:
        captioner: the model, with the same arguments as in fine-tuning.
        baseline: what is subtracted from the reward: "greedy", the reward of the greedy caption (paper), or "mean", the mean reward of
            the pair's other samples (Luo, 2020).
        end_counts: true if the end of a caption counts as a word in the reward.
        settings: other arguments of `Captioning`; `init_from` is best.ckpt of the fine-tuning.
    """

    stage = "reinforce"

    def __init__(
        self, captioner: Captioner, baseline: Baseline = "greedy", end_counts: bool = True, **settings: Any
    ) -> None:
        super().__init__(captioner, **settings)
        self.baseline = baseline
        self.end_counts = end_counts

    def setup(self, stage: str) -> None:
        """Load the fine-tuned weights, and count the n-grams of the training references."""
        if stage != "fit":
            return
        if not self.init_from:
            raise DiffcapError("model.init_from is not set; give best.ckpt of the fine-tuning.")
        data = self.feature_data
        if self.baseline == "mean" and getattr(data, "draws", 0) < 2:  # `draws`: number of sampled captions per pair
            raise DiffcapError("model.baseline is mean, but data.draws is 1; draw at least 2, or choose greedy.")
        self._check_settings()
        init_from(self.captioner, self.init_from, data.words, (), (), self.init_without)
        # Freeze parameters that do not affect the captions, such as those of auxiliary losses: DDP would wait for their gradients.
        table = data.train_table
        images = maps_as_float(table.images(np.array([0])))
        tokens = torch.from_numpy(table.tokens[:1]).long()
        self.captioner.eval()
        logits = self.captioner.teacher_forced_logits(tokens, self.captioner.encode(images["before"], images["after"]))
        logits.logsumexp(-1).sum().backward()
        for parameter in self.captioner.parameters():
            parameter.requires_grad_(parameter.grad is not None)
            parameter.grad = None
        self.captioner.train()
        self._make_metric()
        distinct_tokens = np.unique(table.tokens, axis=0).tolist()
        captions = (self.scored_text(data.vocabulary.decode(ids)) for ids in distinct_tokens)
        words = {word for caption in captions for word in caption.split(" ")}  # for `CaptionReward`
        references: dict[str, list[str]] = {pair_id: [] for pair_id in table.ids}
        for pair_index, caption in zip(table.caption_pair, table.captions):
            references[table.ids[pair_index]].append(self.scored_text(caption))
        self.reward = CaptionReward(references, sorted(words), self.metric_tokenizer, self.end_counts)

    def on_train_start(self) -> None:
        """Validate the initial weights, so that best.ckpt is never worse than the fine-tuned checkpoint."""
        if self.global_step:
            return
        trainer: Any = self.trainer
        trainer.validating = True  # as Lightning does for a validation between two training steps
        trainer.fit_loop.epoch_loop.val_loop.run()
        trainer.training = True

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Sample captions of each pair, compute the self-critical loss, and log the mean reward and baseline."""
        captioner = self.captioner.eval()
        draws = batch["draws"]  # random numbers, one for each word of each sampled caption
        num_pairs, num_samples, max_words = draws.shape
        memory = captioner.encode(batch["before"], batch["after"])  # the encoder's outputs for each pair
        repeated_memory = tree_map(lambda leaf: leaf.repeat_interleave(num_samples, 0), memory)
        tokens = sample_from(captioner, repeated_memory, draws.flatten(0, 1))
        rewards = self.rewards(batch["pair"].repeat_interleave(num_samples), tokens).view(num_pairs, num_samples)
        if self.baseline == "greedy":
            greedy_tokens = greedy(captioner, memory, max_words + 1)
            baseline = self.rewards(batch["pair"], greedy_tokens)[:, None].expand_as(rewards)
        else:
            baseline = leave_one_out_mean(rewards)
        logits = captioner.teacher_forced_logits(tokens, repeated_memory)
        advantage = (rewards - baseline).flatten()
        loss = global_mean(self_critical_loss(logits, tokens, captioner.caption_mask(tokens), advantage))
        means = {"reward": global_mean(rewards.flatten()), "baseline": global_mean(baseline.flatten())}
        self.log_losses(means, num_pairs)
        return loss

    def rewards(self, pair_indices: Tensor, tokens: Tensor) -> Tensor:
        """Return the CIDEr-D (B,) of captions (B, T) against the references of the training pairs with these indices (B,)."""
        data = self.feature_data
        has_end = self.captioner.is_eos(tokens[:, 1:]).any(1)
        pair_ids = [data.train_table.ids[index] for index in pair_indices.tolist()]
        captions = [self.scored_text(data.vocabulary.decode(ids)) for ids in tokens.tolist()]
        rewards = self.reward(pair_ids, captions, has_end.tolist())
        return torch.from_numpy(rewards).to(tokens.device, torch.float32)
