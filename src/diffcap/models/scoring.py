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
    ended = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
    found, cache = [], None
    for position in range(tokens.shape[1] - 1):
        logits, cache = captioner.step(tokens[:, position], memory, cache)
        following = tokens[:, position + 1]
        said = logits.float().log_softmax(-1).gather(1, following[:, None])[:, 0]
        found.append(said.masked_fill(ended, 0.0))
        ended = ended | (following == captioner.end)
    return torch.stack(found, 1) if found else tokens.new_zeros(len(tokens), 0, dtype=torch.float32)
