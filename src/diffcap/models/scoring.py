"""How likely a captioner finds captions: one teacher-forced pass, the same for every method and every search."""

from typing import Any

import torch
from torch import Tensor

from diffcap.models.captioner import Captioner


@torch.no_grad()
def token_log_probabilities(captioner: Captioner, memory: Any, tokens: Tensor) -> Tensor:
    """Natural logarithms of each token's probability given those before it.

    Args:
        memory: of `captioner.encode`, B rows. tokens: (B, T), beginning with the opening token.

    Returns:
        (B, T - 1), of the tokens 1 ... T - 1; 0 after the first closing token.
    """
    following = tokens[:, 1:]
    closing = (following == captioner.end).long()
    said = captioner.next_logits(tokens, memory).float().log_softmax(-1).gather(2, following[..., None])[..., 0]
    return said.masked_fill(closing.cumsum(1) > closing, 0.0)  # what stands behind the first closing token
