"""Self-critical sequence training (Rennie, Marcheret, Mroueh, Ross and Goel, CVPR 2017)."""

from typing import Literal

import torch
from torch import Tensor

Baseline = Literal["greedy", "mean"]


def mean_of_the_others(rewards: Tensor) -> Tensor:
    """The baseline of each of K draws from the K - 1 others (Luo, "A better variant of self-critical sequence training", 2020).

    Args:
        rewards: (B, K), K > 1.

    Raises:
        ValueError: there is one draw only.
    """
    if rewards.shape[1] < 2:
        raise ValueError("the mean of the other draws needs at least two draws a pair")
    return (rewards.sum(1, keepdim=True) - rewards) / (rewards.shape[1] - 1)


def self_critical(logits: Tensor, tokens: Tensor, said: Tensor, advantage: Tensor) -> Tensor:
    """Policy gradient as a loss: of each caption `-(reward - baseline) * log p(caption)` (Rennie et al., eq. 7 and 9).

    Args:
        logits: (B, T - 1, V) of positions 1 ... T - 1. tokens: (B, T) drawn captions. said: (B, T - 1), which of the
            tokens after the first count. advantage: (B,) reward less baseline; no gradient passes through it.

    Returns:
        (B,) losses.
    """
    chosen = logits.float().log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0]
    return -advantage.detach() * torch.where(said, chosen, 0.0).sum(1)
