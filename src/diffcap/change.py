"""A caption of a pair of images, and what it tells: the probability of a change, and the attention maps of its words."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from diffcap.datasets.no_change import ALL_NO_CHANGE, is_no_change
from diffcap.models.answering import Answer
from diffcap.models.captioner import Captioner
from diffcap.text.hub import HubVocabulary
from diffcap.text.vocabularies import AnyVocabulary
from diffcap.utils.host_copy import HostCopy
from diffcap.worlds.blocks.captions import NO_CHANGE as BLOCKS_NO_CHANGE

NO_CHANGE_SENTENCES = tuple(dict.fromkeys((*ALL_NO_CHANGE, *BLOCKS_NO_CHANGE)))  # of all datasets
MapArray = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Word:
    """A word of a caption, and the natural logarithm of its probability given the words before it."""

    text: str
    log_probability: float


@dataclass(frozen=True)
class Alternative:
    """Another hypothesis of a beam search, or the greedy caption."""

    text: str
    log_probability: float


@dataclass(frozen=True)
class Caption:
    """A caption of two images.

    Attributes:
        text: the sentence. words: its words with their log-probabilities.
        log_probability: natural logarithm of the sentence's probability, including its end token unless it was cut at the maximum length.
            It is None, and there are no words, if the model only answers with text (`diffcap.models.answering`).
        nothing_changed: probability that nothing changed except the viewpoint; None if the method does not predict it.
        alternatives: the other hypotheses of a beam search and the greedy caption, best first.
        notes: a sentence for each unexpected conversion of an image, and for images that differ in size, color or type.
        tokens: token ids, from the start token to the end token.
        scored: natural logarithms of the probabilities of the sentences that were given to `PairCaptioner.batch`; -inf for a
            sentence with a word that is not in the vocabulary.
        box: left, top, right and bottom of the change in pixels of the image after, if `PairCaptioner.batch` was asked to locate it.
            It surrounds the pixels that differ. If they are more than half of the image, or if the sizes differ, it surrounds the
            positions with at least half of the highest attention of all words. None if the caption says that nothing has changed.
        fit: how the images were fitted to each other ("kind", "size", "movement", "inliers", "correlation"); None if they were not.
        answer: the model's answer with its number of tokens, if the model only answers with text.
    """

    text: str
    log_probability: float | None
    words: tuple[Word, ...]
    nothing_changed: float | None = None
    alternatives: tuple[Alternative, ...] = ()
    notes: tuple[str, ...] = ()
    tokens: tuple[int, ...] = field(default=(), repr=False)
    scored: tuple[float, ...] = ()
    box: tuple[int, ...] | None = None
    fit: Mapping[str, Any] | None = None
    answer: Answer | None = field(default=None, repr=False)

    def as_dict(self) -> dict[str, Any]:
        """Return all attributes except the token ids, `scored` and `answer`, as JSON values."""
        values = asdict(self)
        del values["tokens"], values["scored"], values["answer"]
        return values


def scored_sentences(captioner: Any) -> tuple[str, ...]:
    """Return the argument `sentences` of `captioner.batch` for `no_change_probability`; () for a captioner that writes free text."""
    vocabulary = captioner.vocabulary
    writes_free_text = isinstance(vocabulary, HubVocabulary) and vocabulary.num_sentences is not None  # not fine-tuned
    return () if writes_free_text else NO_CHANGE_SENTENCES


def no_change_probability(caption: Caption) -> float:
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


def change_probability(caption: Caption) -> float:
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
