"""Greedy, sampled and beam decoding, one function each, over any captioner's `step`."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from diffcap.errors import DiffcapError
from diffcap.models.captioner import Captioner

# A search over B pairs decodes B x beams captions at once. Captions get worse long before this width (Koehn and Knowles, "Six
# challenges for neural machine translation", 2017, section 3.6).
MAX_BEAMS = 100


def check_search(beams: int, length_penalty: float = 0.0, option: str = "beams") -> None:
    """Check what a user gives as arguments of `beam_search`, before models are loaded; the function itself has no limit.

    Raises:
        DiffcapError: `beams` is not 1 to `MAX_BEAMS` (`option` is its name in the message), or `length_penalty` is not finite.
    """
    if not 1 <= beams <= MAX_BEAMS:
        raise DiffcapError(f"{option} is {beams}; give 1 to {MAX_BEAMS}.")
    if not math.isfinite(length_penalty):
        raise DiffcapError(f"the length penalty is {length_penalty}; give a finite number.")


@torch.no_grad()
def greedy(captioner: Captioner, before: Tensor, after: Tensor, max_length: int) -> Tensor:
    """Take the most likely word at every position.

    Args:
        before, after: (B, C, h, w). max_length: positions, the opening token included.

    Returns:
        (B, T) ids with T <= max_length, beginning with the opening token; behind what closes a caption (see
        `Captioner.closes`) only `end` follows. T is where the last caption of the batch ended.
    """
    return greedy_from(captioner, captioner.encode(before, after), max_length)


@torch.no_grad()
def greedy_from(captioner: Captioner, memory: Any, max_length: int) -> Tensor:
    """`greedy` from what `encode` gave."""
    return _one_by_one(captioner, memory, max_length, lambda logits, _: logits.argmax(-1))


@torch.no_grad()
def sample_from(captioner: Captioner, memory: Any, draws: Tensor) -> Tensor:
    """Draw every word by its probability, from what `encode` gave.

    Args:
        memory: of B captions. draws: (B, T - 1) uniform in [0, 1): position t's word is where draw t falls among the
            probabilities laid end to end.

    Returns:
        (B, at most T) ids in the form of `greedy`.
    """

    def draw(logits: Tensor, position: int) -> Tensor:
        heights = logits.double().softmax(-1).cumsum(-1)
        wanted = draws[:, position, None].to(heights) * heights[:, -1:]  # rounding leaves the last height off 1
        return torch.searchsorted(heights, wanted, right=True)[:, 0].clamp(max=logits.shape[-1] - 1)

    return _one_by_one(captioner, memory, draws.shape[1] + 1, draw)


def _one_by_one(captioner: Captioner, memory: Any, max_length: int, choose: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Captions whose next words are chosen from logits (B, V) at positions 0, 1, ..., until all have ended."""
    memory = tree_map(Tensor.contiguous, memory)  # laid out once for all steps
    first = tree_leaves(memory)[0]
    tokens = torch.full((len(first), 1), captioner.begin, device=first.device)
    ended = torch.zeros(len(first), dtype=torch.bool, device=first.device)
    cache = None
    for position in range(max_length - 1):
        logits, cache = captioner.step(tokens[:, -1], memory, cache)
        word = choose(logits, position).masked_fill(ended, captioner.end)
        tokens = torch.cat([tokens, word[:, None]], 1)
        ended = ended | captioner.closes(word)
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
            0 compares plain sums; what closes it counts as a word.

    Returns:
        (B, T) ids of the best caption of each pair, in the form of `greedy`.
    """
    return beam_hypotheses(captioner, before, after, max_length, beams, length_penalty)[:, 0]


@torch.no_grad()
def beam_hypotheses(
    captioner: Captioner, before: Tensor, after: Tensor, max_length: int, beams: int, length_penalty: float = 0.0
) -> Tensor:
    """All that a `beam_search` ends with: (B, beams, T) ids, best first; arguments as there."""
    memory = captioner.encode(before, after)
    first = tree_leaves(memory)[0]
    pairs, device = len(first), first.device
    memory = tree_map(lambda leaf: leaf.repeat_interleave(beams, 0), memory)
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
        # An ended caption goes on with `end` at no cost, in one way only.
        closed = torch.full_like(gain, float("-inf"))
        closed[..., captioner.end] = 0.0
        total = scores[..., None] + torch.where(ended[..., None], closed, gain)
        scores, best = total.flatten(1).topk(beams, dim=1)  # (pairs, beams)
        origin, word = best // gain.shape[-1], best % gain.shape[-1]
        rows = (origin + offset).flatten()
        tokens = torch.cat([tokens[rows], word.flatten()[:, None]], 1)
        cache = tree_map(lambda leaf, rows=rows: leaf[rows], cache)
        words = words.gather(1, origin) + (~ended.gather(1, origin)).float()
        ended = ended.gather(1, origin) | captioner.closes(word)
        if ended.all():
            break
    ranked = (scores / words.clamp(min=1) ** length_penalty).argsort(dim=1, descending=True, stable=True)
    return tokens.view(pairs, beams, -1)[torch.arange(pairs, device=device)[:, None], ranked]
