"""Greedy and beam decoding, one function each, over any captioner's `step`."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from diffcap.models.captioner import Captioner


@torch.no_grad()
def greedy(captioner: Captioner, before: Tensor, after: Tensor, max_length: int) -> Tensor:
    """Take the most likely word at every position.

    Args:
        before, after: (B, C, h, w). max_length: positions, the opening token included.

    Returns:
        (B, T) ids with T <= max_length, beginning with the opening token; once a caption has ended, only the closing
        token follows. T is where the last caption of the batch ended.
    """
    memory = tree_map(Tensor.contiguous, captioner.encode(before, after))  # laid out once for all steps
    tokens = torch.full((len(before), 1), captioner.begin, device=before.device)
    ended = torch.zeros(len(before), dtype=torch.bool, device=before.device)
    cache = None
    for _ in range(max_length - 1):
        logits, cache = captioner.step(tokens[:, -1], memory, cache)
        word = logits.argmax(-1).masked_fill(ended, captioner.end)
        tokens = torch.cat([tokens, word[:, None]], 1)
        ended = ended | (word == captioner.end)
        if ended.all():
            break
    return tokens


@torch.no_grad()
def beam_search(
    captioner: Captioner, before: Tensor, after: Tensor, max_length: int, beams: int, length_penalty: float = 0.0
) -> Tensor:
    """Keep the `beams` most likely openings of every caption.

    Args:
        before, after: (B, C, h, w). max_length: positions, the opening token included. beams: 1 gives `greedy`.
        length_penalty: the total log-probability is divided by `words ** length_penalty` when the best is chosen;
            0 compares plain sums.

    Returns:
        (B, T) ids of the best caption of each pair, in the form of `greedy`.
    """
    return beam_hypotheses(captioner, before, after, max_length, beams, length_penalty)[:, 0]


@torch.no_grad()
def beam_hypotheses(
    captioner: Captioner, before: Tensor, after: Tensor, max_length: int, beams: int, length_penalty: float = 0.0
) -> Tensor:
    """All that a `beam_search` ends with: (B, beams, T) ids, best first; arguments as there."""
    pairs, end = len(before), captioner.end
    memory = tree_map(lambda leaf: leaf.repeat_interleave(beams, 0), captioner.encode(before, after))
    device = before.device
    tokens = torch.full((pairs * beams, 1), captioner.begin, device=device)
    scores = torch.full((pairs, beams), float("-inf"), device=device)
    scores[:, 0] = 0.0  # all beams begin alike: only the first may branch
    ended = torch.zeros(pairs, beams, dtype=torch.bool, device=device)
    words = torch.zeros(pairs, beams, device=device)
    offset = torch.arange(pairs, device=device)[:, None] * beams
    cache: Any = None
    for _ in range(max_length - 1):
        logits, cache = captioner.step(tokens[:, -1], memory, cache)
        gain = logits.float().log_softmax(-1).view(pairs, beams, -1)
        # An ended caption goes on with the closing token at no cost, in one way only.
        closed = torch.full_like(gain, float("-inf"))
        closed[..., end] = 0.0
        total = scores[..., None] + torch.where(ended[..., None], closed, gain)
        scores, best = total.flatten(1).topk(beams, dim=1)  # (pairs, beams)
        origin, word = best // gain.shape[-1], best % gain.shape[-1]
        rows = (origin + offset).flatten()
        tokens = torch.cat([tokens[rows], word.flatten()[:, None]], 1)
        cache = tree_map(lambda leaf, rows=rows: leaf[rows], cache)
        words = words.gather(1, origin) + (~ended.gather(1, origin)).float()
        ended = ended.gather(1, origin) | (word == end)
        if ended.all():
            break
    ranked = (scores / words.clamp(min=1) ** length_penalty).argsort(dim=1, descending=True, stable=True)
    return tokens.view(pairs, beams, -1)[torch.arange(pairs, device=device)[:, None], ranked]
