"""The vocabulary of any method by its layout's name."""

from collections.abc import Iterable, Sequence
from typing import Literal, get_args

from diffcap.text.bpe import ClipLayout, ClipVocabulary, build_clip_vocabulary
from diffcap.text.vocabulary import Vocabulary, build_vocabulary

AnyLayout = Literal["pcl", "rcc", "rcc_tokens", "clip", "clip_used", "clip_released"]
AnyVocabulary = Vocabulary | ClipVocabulary


def vocabulary_of(words: Sequence[str], layout: AnyLayout) -> AnyVocabulary:
    """A vocabulary from what a checkpoint holds of it.

    Raises:
        ValueError: the words are none of such a layout's.
    """
    if layout in get_args(ClipLayout):
        return ClipVocabulary(words, layout)  # type: ignore[arg-type]
    return Vocabulary(list(words), layout)  # type: ignore[arg-type]


def vocabulary_for(captions: Iterable[str], min_count: int, layout: AnyLayout) -> AnyVocabulary:
    """The vocabulary of training captions.

    Args:
        min_count: how often a word must occur; CLIP's tokens need not.
    """
    if layout in get_args(ClipLayout):
        return build_clip_vocabulary(captions, layout)  # type: ignore[arg-type]
    return build_vocabulary(captions, min_count, layout)  # type: ignore[arg-type]
