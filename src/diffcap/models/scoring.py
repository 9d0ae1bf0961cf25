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
        (B, T - 1), of the tokens 1 ... T - 1; 0 behind what closes the caption, see `Captioner.said`.
    """
    found = captioner.next_logits(tokens, memory).float().log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0]
    return torch.where(captioner.said(tokens), found, 0.0)
