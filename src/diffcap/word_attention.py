"""Attention maps of the words of a caption."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from diffcap.models.captioner import Captioner
from diffcap.text.vocabularies import AnyVocabulary

Maps = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True)
class AttentionMaps:
    """Attention of each word of a caption to the positions of both images.

    Attributes:
        words: W words. before, after: (W, h, w) attention weights; each map sums to 1, or both maps of a word to 2.
        alignment: (h w, h w), weights that match each position of the before image (row) with positions of the after image;
            None if the method does not align the images.
    """

    words: list[str]
    before: Maps
    after: Maps
    alignment: Maps | None


@torch.no_grad()
def attention_of(
    captioner: Captioner, vocabulary: AnyVocabulary, before: Any, after: Any, tokens: Sequence[int]
) -> AttentionMaps:
    """Attention maps of each word of a caption; for a word of several tokens, their mean.

    Args:
        before, after: features of one pair, (1, C, h, w); for an ensemble, lists with those of each member.
        tokens: token ids of the caption, from the start token on; the end token has no map.

    Raises:
        NotImplementedError: the method has no attention maps.
    """
    device = next(captioner.parameters()).device
    maps = captioner.attention(before, after, torch.tensor([list(tokens[:-1])], device=device))
    spans = word_spans(vocabulary, tokens)  # the map of a word has the index of the token before it
    sides = [
        np.stack([side[0, places].mean(0).cpu().numpy() for _, places in spans] or [np.zeros(side.shape[2:])])
        for side in (maps.before, maps.after)
    ]
    alignment = None if maps.alignment is None else maps.alignment[0].cpu().numpy()
    return AttentionMaps([word for word, _ in spans], sides[0][: len(spans)], sides[1][: len(spans)], alignment)


def word_spans(vocabulary: AnyVocabulary, tokens: Iterable[int]) -> list[tuple[str, list[int]]]:
    """The words of a caption, each with the indices of its tokens, counted from the token after the start token."""
    ids = list(tokens)
    spans: list[tuple[str, list[int]]] = []
    for index in range(len(ids) - 1):
        text = vocabulary.decode_plain(ids[: index + 2])
        words = text.split(" ") if text else []
        if len(words) > len(spans):
            spans.append((words[-1], [index]))
        elif spans and words[-1] != spans[-1][0]:
            spans[-1] = (words[-1], [*spans[-1][1], index])
    return spans
