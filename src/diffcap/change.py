"""What a caption tells about a pair of images: the probability of a change, and the attention maps of its words."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from diffcap.datasets.no_change import ALL_NO_CHANGE, is_no_change
from diffcap.models.captioner import Captioner
from diffcap.text.hub import HubVocabulary
from diffcap.text.vocabularies import AnyVocabulary
from diffcap.utils.host_copy import HostCopy
from diffcap.worlds.blocks.captions import NO_CHANGE as BLOCKS_NO_CHANGE

if TYPE_CHECKING:
    from diffcap.pair_captioner import Caption

NO_CHANGE_SENTENCES = tuple(dict.fromkeys((*ALL_NO_CHANGE, *BLOCKS_NO_CHANGE)))  # of all datasets
MapArray = npt.NDArray[np.floating[Any]]


def scored_sentences(captioner: Any) -> tuple[str, ...]:
    """Return the argument `sentences` of `captioner.batch` for `no_change_probability`; () for a captioner that writes free text."""
    vocabulary = captioner.vocabulary
    writes_free_text = isinstance(vocabulary, HubVocabulary) and vocabulary.num_sentences is not None  # not fine-tuned
    return () if writes_free_text else NO_CHANGE_SENTENCES


def no_change_probability(caption: "Caption") -> float:
    """Return the captioner's probability that nothing has changed in a pair.

    * 1 if the caption says so (`is_no_change`);
    * else the method's own estimate, if it has one (in IDC-PCL, "distractor judging" estimates it);
    * else the sum of the probabilities of `NO_CHANGE_SENTENCES`, which is the probability that a sampled caption is one of these
      sentences. `caption.scored` has the logarithms of the probabilities; it is empty for models that write free text.
    """
    if is_no_change(caption.text):
        return 1.0
    if caption.nothing_changed is not None:
        return caption.nothing_changed
    return min(1.0, math.fsum(map(math.exp, caption.scored)))


def change_probability(caption: "Caption") -> float:
    """Return the probability that something has changed, 1 - `no_change_probability`, with the four decimals that files have."""
    return round(1 - no_change_probability(caption), 4)


@dataclass(frozen=True)
class AttentionMaps:
    """Attention of each of W words of a caption to the positions of both images."""

    words: list[str]
    before: MapArray  # (W, h, w); each map sums to 1, or the two maps of a word together to 2
    after: MapArray
    alignment: MapArray | None  # (h w, h w), from each position before to all positions after; or None


@torch.no_grad()
def attention_of(
    captioner: Captioner, vocabulary: AnyVocabulary, before: Any, after: Any, tokens: Sequence[int]
) -> AttentionMaps:
    """Return attention maps of each word of a caption with the ids `tokens`; a word of several tokens has the mean of their maps.

    `before` and `after` are features of one pair, (1, C, h, w); for an ensemble, lists with the features of each member.
    """
    device = next(captioner.parameters()).device
    maps = captioner.attention(before, after, torch.tensor([list(tokens[:-1])], device=device))
    spans = word_spans(vocabulary, tokens)
    words = [word for word, _ in spans]
    before_maps, after_maps, *alignment = HostCopy(*(part[0] for part in maps if part is not None)).wait()
    word_maps = _word_maps(before_maps, spans), _word_maps(after_maps, spans)
    return AttentionMaps(words, *word_maps, alignment[0].numpy() if alignment else None)


def _word_maps(token_maps: Tensor, spans: Sequence[tuple[str, list[int]]]) -> MapArray:
    """Return for each word the mean of its tokens' maps, (W, h, w). Of the maps (T, h, w), map 0 is of the first token after BOS."""
    if not spans:
        return np.zeros((0, *token_maps.shape[1:]))
    return np.stack([token_maps[indices].mean(0).numpy() for _, indices in spans])


def word_spans(vocabulary: AnyVocabulary, tokens: Sequence[int]) -> list[tuple[str, list[int]]]:
    """Return the words of a caption, each with the indices of its tokens, counted from the token after the start token."""
    spans: list[tuple[str, list[int]]] = []
    for index in range(len(tokens) - 1):
        text = vocabulary.decode_plain(list(tokens[: index + 2]))  # each further id only adds to this text
        words = text.split(" ") if text else []
        if len(words) > len(spans):
            spans.append((words[-1], [index]))
        elif spans and words[-1] != spans[-1][0]:  # the token continues the last word
            _, indices = spans[-1]
            spans[-1] = (words[-1], [*indices, index])
    return spans
