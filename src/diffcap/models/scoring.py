"""Log-probabilities of given captions, from one teacher-forced pass; the same for every method and decoding algorithm."""

from typing import Any

import torch
from torch import Tensor

from diffcap.models.captioner import Captioner


@torch.no_grad()
def token_log_probabilities(captioner: Captioner, memory: Any, tokens: Tensor) -> Tensor:
    """Natural logarithm of the probability of each token given the tokens before it.

    Args:
        memory: from `captioner.encode`, B rows. tokens: (B, T), beginning with BOS.

    Returns:
        (B, T - 1), of the tokens 1 ... T - 1; 0 after the end of the caption, see `Captioner.caption_mask`.
    """
    log_probabilities = (
        captioner.teacher_forced_logits(tokens, memory).float().log_softmax(-1).gather(2, tokens[:, 1:, None])
    )
    return torch.where(captioner.caption_mask(tokens), log_probabilities[..., 0], 0.0)
