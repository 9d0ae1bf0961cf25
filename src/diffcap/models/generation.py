"""Greedy, sampled and beam decoding over any captioner's `step`, the probabilities of given captions, and ensembles.

Letters: B pairs, T text positions, V vocabulary. A memory is what `Captioner.encode` returns for B pairs.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from diffcap.models.captioner import AttentionMaps, Captioner
from diffcap.utils.errors import DiffcapError

# Beam search over B pairs decodes B x beams captions at once. Captions get worse long before this number of beams (Koehn and
# Knowles, "Six challenges for neural machine translation", 2017, section 3.6).
MAX_BEAMS = 100
# On a GPU, the host checks only after this number of words whether all captions have ended, because the GPU has no work while the host
# waits for the result. Up to 7 positions after the last end are computed and then cut off. On the CPU, it checks after every word.
WORDS_PER_WAIT = 8
NAN_PROBABILITIES = (
    "the captioner's probabilities are NaN: its weights diverged in training or are damaged; use another checkpoint."
)


def check_search(beams: int, length_penalty: float = 0.0, option: str = "beams") -> None:
    """Raise a DiffcapError if arguments of `beam_search` are out of range; `option` is the name of `beams` in the message."""
    if not 1 <= beams <= MAX_BEAMS:
        raise DiffcapError(f"{option} is {beams}; give 1 to {MAX_BEAMS}.")
    if not math.isfinite(length_penalty):
        raise DiffcapError(f"the length penalty is {length_penalty}; give a finite number.")


@torch.no_grad()
def greedy(captioner: Captioner, memory: Any, max_length: int) -> Tensor:
    """Generate a caption for each of B pairs, from the most likely word at every position.

    Returns ids (B, T), T <= max_length, beginning with BOS. T is the length of the longest caption. After the id that ends a caption
    (see `Captioner.is_eos`) all ids are `eos_id`.
    """
    return _decode(captioner, memory, max_length, lambda logits, _: logits.argmax(-1))


@torch.no_grad()
def sample_from(captioner: Captioner, memory: Any, draws: Tensor) -> Tensor:
    """Sample every word from the captioner's probabilities; return ids (B, at most T) as `greedy` does.

    `draws`: (B, T - 1) uniform random numbers in [0, 1). A word is the first id whose cumulative probability exceeds the word's draw.
    """

    def sample(logits: Tensor, position: int) -> Tensor:
        cumulative = logits.double().softmax(-1).cumsum(-1)
        total = cumulative[:, -1:]  # 1 up to rounding
        threshold = draws[:, position, None].to(cumulative) * total
        return torch.searchsorted(cumulative, threshold, right=True)[:, 0].clamp(max=logits.shape[-1] - 1)

    return _decode(captioner, memory, draws.shape[1] + 1, sample)


def _decode(captioner: Captioner, memory: Any, max_length: int, choose_ids: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Generate captions word by word until all have ended; `choose_ids` maps logits (B, V) and their position to ids (B,)."""
    memory = tree_map(Tensor.contiguous, memory)  # once, not at every step
    memory_tensor = tree_leaves(memory)[0]
    num_pairs = len(memory_tensor)
    tokens = torch.full((num_pairs, 1), captioner.bos_id, device=memory_tensor.device)
    has_ended = torch.zeros(num_pairs, dtype=torch.bool, device=memory_tensor.device)
    unfinished = torch.zeros((), dtype=torch.int64, device=memory_tensor.device)  # see `_find_end`
    cache = None
    for num_words in range(1, max_length):
        logits, cache = captioner.step(tokens[:, -1], memory, cache)
        next_ids = choose_ids(logits, num_words - 1).masked_fill(has_ended, captioner.eos_id)
        tokens = torch.cat([tokens, next_ids[:, None]], 1)
        has_ended = has_ended | captioner.is_eos(next_ids)
        unfinished = unfinished + ~has_ended.all()
        if end := _find_end(unfinished, num_words, max_length - 1):
            return tokens[:, : 1 + end]
    return tokens


def _find_end(unfinished: Tensor, num_words: int, max_words: int) -> int | None:
    """Return the number of words of the longest caption; None if it has not ended, or the host does not wait for the device yet.

    `unfinished`: the number of words so far after which at least one caption had not ended.
    """
    if not unfinished.is_cpu and num_words % WORDS_PER_WAIT and num_words < max_words:
        return None
    [count] = unfinished.view(1).tolist()
    return count + 1 if count < num_words else None


@torch.no_grad()
def beam_search(captioner: Captioner, memory: Any, max_length: int, beams: int, length_penalty: float = 0.0) -> Tensor:
    """Keep the `beams` most likely beginnings of every caption at each step. Return the ids (B, beams, T) of the captions, best first.

    Args:
        max_length: positions, BOS included. beams: 1 gives `greedy`.
        length_penalty: finished captions are ranked by their log-probability divided by `words ** length_penalty`; EOS counts
            as a word. 0 ranks by the log-probability itself.
    """
    memory_tensor = tree_leaves(memory)[0]
    num_pairs = len(memory_tensor)
    device = memory_tensor.device
    memory = tree_map(lambda tensor: tensor.repeat_interleave(beams, 0), memory)
    tokens = torch.full((num_pairs * beams, 1), captioner.bos_id, device=device)
    scores = torch.full((num_pairs, beams), float("-inf"), device=device)  # log-probabilities of the captions so far
    scores.select(1, 0).fill_(0.0)  # all beams are equal at first, so only one of them may be continued
    has_ended = torch.zeros(num_pairs, beams, dtype=torch.bool, device=device)
    word_counts = torch.zeros(num_pairs, beams, device=device)
    first_rows = torch.arange(num_pairs, device=device)[:, None] * beams  # first row of each pair in `tokens`
    unfinished = torch.zeros((), dtype=torch.int64, device=device)  # see `_find_end`
    cache: Any = None
    for num_words in range(1, max_length):
        logits, cache = captioner.step(tokens[:, -1], memory, cache)
        log_probabilities = logits.float().log_softmax(-1).view(num_pairs, beams, -1)  # (B, beams, V)
        # An ended caption is continued with `eos_id` only, with log-probability 0.
        eos_only = torch.full_like(log_probabilities, float("-inf"))
        eos_only.select(2, captioner.eos_id).fill_(0.0)
        next_scores = scores[..., None] + torch.where(has_ended[..., None], eos_only, log_probabilities)
        vocabulary_size = next_scores.shape[-1]
        scores, continuations = next_scores.flatten(1).topk(beams, dim=1)  # (B, beams) each; indices in beams * V
        own_ends = torch.arange(beams, device=device) * vocabulary_size + captioner.eos_id
        # After all captions have ended, a GPU may run more steps. Each beam then continues itself: `topk` could reorder equal scores.
        continuations = torch.where(has_ended.all(), own_ends, continuations)
        parents = continuations // vocabulary_size  # the beams that are continued
        next_ids = continuations % vocabulary_size
        parent_rows = (parents + first_rows).flatten()
        tokens = torch.cat([tokens[parent_rows], next_ids.flatten()[:, None]], 1)
        cache = tree_map(lambda tensor, rows=parent_rows: tensor[rows], cache)
        has_ended = has_ended.gather(1, parents)
        word_counts = word_counts.gather(1, parents) + (~has_ended).float()
        has_ended = has_ended | captioner.is_eos(next_ids)
        unfinished = unfinished + ~has_ended.all()
        if end := _find_end(unfinished, num_words, max_length - 1):
            tokens = tokens[:, : 1 + end]
            break
    order = rank_beams(scores, word_counts, length_penalty)
    captions = tokens.view(num_pairs, beams, -1)
    return captions.take_along_dim(order[..., None], 1)


def rank_beams(log_probabilities: Tensor, word_counts: Tensor, length_penalty: float) -> Tensor:
    """Return the indices of each pair's hypotheses, best first by the score of `beam_search`; all tensors are (B, hypotheses)."""
    scores = log_probabilities / word_counts.clamp(min=1) ** length_penalty
    return scores.argsort(dim=1, descending=True, stable=True)


@torch.no_grad()
def token_log_probabilities(captioner: Captioner, memory: Any, tokens: Tensor) -> Tensor:
    """Return the natural logarithms (B, T - 1) of the probabilities of the tokens 1 ... T - 1 of given captions (B, T).

    They are 0 after the end of the caption, see `Captioner.caption_mask`.
    """
    logits = captioner.teacher_forced_logits(tokens, memory)
    token_scores = logits.float().log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0]
    return token_scores.masked_fill(~captioner.caption_mask(tokens), 0.0)


class Ensemble(Captioner):
    """Several captioners that decode together. They may have different methods, but have the same ids for the same words.

    `before` and `after` are lists with the feature maps (B, C, h, w) for each member.
    """

    def __init__(self, members: Sequence[Captioner]) -> None:
        super().__init__()
        self.members: Iterable[Any] = nn.ModuleList(members)
        self.bos_id = members[0].bos_id
        self.eos_id = members[0].eos_id
        self.extra_eos_id = members[0].extra_eos_id
        self.vocabulary_layout = members[0].vocabulary_layout  # the special tokens and their ids

    def encode(self, before: Any, after: Any) -> list[Any]:
        """Return the memory of each member."""
        return [member.encode(*member_maps) for member, *member_maps in zip(self.members, before, after)]

    def step(self, tokens: Tensor, memory: Any, cache: Any) -> tuple[Tensor, Any]:
        """Score the next word (see `Captioner.step`): the logits are the logarithms of every word's mean probability."""
        caches = cache or [None] * len(memory)
        outputs = [member.step(tokens, *state) for member, *state in zip(self.members, memory, caches)]
        logits, new_caches = zip(*outputs)
        return _mean_log_probabilities(logits), list(new_caches)

    def teacher_forced_logits(self, tokens: Tensor, memory: Any) -> Tensor:
        """Score the words of given captions in one pass, see `Captioner.teacher_forced_logits`."""
        logits = [member.teacher_forced_logits(tokens, part) for member, part in zip(self.members, memory)]
        return _mean_log_probabilities(logits)

    def nothing_changed(self, before: Any, after: Any) -> Tensor | None:
        """Return the mean probability that only the viewpoint changed, over the members that estimate it; else None."""
        estimates = [member.nothing_changed(*member_maps) for member, *member_maps in zip(self.members, before, after)]
        probabilities = [estimate for estimate in estimates if estimate is not None]
        return torch.stack(probabilities).mean(0) if probabilities else None

    def attention(self, before: Any, after: Any, tokens: Tensor) -> AttentionMaps:
        """Return the mean of the members' attention maps, see `Captioner.attention`."""
        attentions = [member.attention(*pair, tokens) for member, *pair in zip(self.members, before, after)]
        if len({attention.before.shape for attention in attentions}) > 1:
            raise NotImplementedError("the attention maps of the members have different sizes")
        means: list[Any] = []  # of before, after and alignment
        for maps in zip(*attentions):
            has_maps = all(part is not None for part in maps)
            means.append(torch.stack(maps).mean(0) if has_maps else None)
        return AttentionMaps(*means)


def _mean_log_probabilities(member_logits: Sequence[Tensor]) -> Tensor:
    """Return the logarithm (..., V) of the mean of several models' probabilities, from the logits (..., V) of each."""
    log_probabilities = torch.stack([logits.float().log_softmax(-1) for logits in member_logits])
    return log_probabilities.logsumexp(0) - math.log(len(member_logits))
