"""The vocabulary of any method by its layout's name."""

from collections.abc import Iterable, Sequence
from typing import Literal, get_args

from diffcap.text.bpe import ClipLayout, ClipVocabulary, build_clip_vocabulary
from diffcap.text.hub import HubVocabulary, hub_vocabulary
from diffcap.text.vocabulary import Vocabulary, build_vocabulary
from diffcap.utils.errors import DiffcapError

AnyLayout = Literal["pcl", "rcc", "rcc_tokens", "rsicc", "chg2cap", "clip", "clip_used", "clip_released", "hub"]
AnyVocabulary = Vocabulary | ClipVocabulary | HubVocabulary


def vocabulary_of(words: Sequence[str], layout: AnyLayout) -> AnyVocabulary:
    """A vocabulary from what a checkpoint holds of it."""
    if layout == "hub":
        raise ValueError("its tokens come with a base model")
    if layout in get_args(ClipLayout):
        return ClipVocabulary(words, layout)  # type: ignore[arg-type]
    return Vocabulary(list(words), layout)  # type: ignore[arg-type]


def vocabulary_for(
    captions: Iterable[str],
    min_count: int,
    layout: AnyLayout,
    base: str | None = None,
    base_revision: str | None = None,
) -> AnyVocabulary:
    """The vocabulary of training captions.

    Args:
        min_count: how often a word must occur; the tokens of CLIP and of vision-language models need not.
        base, base_revision: the base model whose tokens the layout "hub" has, see `base_models.find_base`.
    """
    if layout == "hub":
        if base is None:
            raise DiffcapError("data.vocabulary_layout is hub, which is for METHOD=vlm; remove the option.")
        return hub_vocabulary(base, base_revision)
    if layout in get_args(ClipLayout):
        return build_clip_vocabulary(captions, layout)  # type: ignore[arg-type]
    return build_vocabulary(captions, min_count, layout)  # type: ignore[arg-type]
