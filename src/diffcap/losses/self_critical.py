"""Self-critical sequence training (Rennie, Marcheret, Mroueh, Ross and Goel, CVPR 2017)."""

from typing import Literal

import torch
from torch import Tensor

Baseline = Literal["greedy", "mean"]  # reward of the greedy caption, or mean reward of a pair's other samples


def leave_one_out_mean(rewards: Tensor) -> Tensor:
    """Return a baseline (B, K) for the rewards (B, K) of K > 1 sampled captions per pair: the mean reward of the K - 1 other captions.

    Source: Luo, "A better variant of self-critical sequence training", 2020.

    Example:
        >>> leave_one_out_mean(torch.tensor([[1.0, 2.0, 6.0]])).tolist()
        [[4.0, 3.5, 1.5]]
    """
    return (rewards.sum(1, keepdim=True) - rewards) / (rewards.shape[1] - 1)


def self_critical_loss(logits: Tensor, tokens: Tensor, caption_mask: Tensor, advantage: Tensor) -> Tensor:
    """Return the loss (B,) `-(reward - baseline) * log p(caption)`, whose gradient is the policy gradient (Rennie et al., eq. 7 and 9).

    Args:
        logits: (B, T - 1, V) of the words at positions 1 ... T - 1, V: vocabulary. tokens: (B, T) B sampled captions, BOS at position 0.
        caption_mask: (B, T - 1) boolean, True for the tokens after BOS that belong to the caption.
        advantage: (B,) reward minus baseline; it gets no gradient.

    Example:
        >>> logits, tokens = torch.zeros(1, 2, 4), torch.tensor([[0, 3, 1]])
        >>> caption_mask = torch.tensor([[True, True]])
        >>> self_critical_loss(logits, tokens, caption_mask, advantage=torch.tensor([0.5]))
        tensor([1.3863])
    """
    token_scores = logits.float().log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0]
    return -advantage.detach() * torch.where(caption_mask, token_scores, 0.0).sum(1)
