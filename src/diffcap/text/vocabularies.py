"""A vocabulary of CLIP's tokens, and functions that make any vocabulary from the name of its layout (its kind, such as "clip")."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal, get_args

from diffcap.text.hub import HubVocabulary, load_processor, read_chat_template
from diffcap.text.vocabulary import LayoutName, Vocabulary, build_vocabulary
from diffcap.utils.errors import DiffcapError

if TYPE_CHECKING:
    from open_clip.tokenizer import SimpleTokenizer

ClipLayout = Literal["clip", "clip_used", "clip_released"]
AnyLayout = Literal[LayoutName, ClipLayout, "hub"]  # "hub": the tokens of a vision-language model


@functools.cache
def clip_tokenizer() -> SimpleTokenizer:
    """Return CLIP's tokenizer with 49,408 tokens. It converts texts to lower case, and ftfy repairs broken Unicode."""
    from open_clip.tokenizer import SimpleTokenizer  # imports torchvision, which is too slow for --help

    return SimpleTokenizer()


class ClipVocabulary:
    """A vocabulary of CLIP's tokens, with the same methods as `Vocabulary`, the vocabulary of words.

    Args:
        words: for "clip_used", the tokens of the vocabulary, in CLIP's order; empty for the other layouts.
        layout: "clip" has CLIP's ids, and the padding id 49,408, which CLIP does not use.
            "clip_released" has CLIP's ids, and the padding id 0, as in the code that CLIP4IDC's authors released. Id 0 is also the
            word "!". So "!" is never learned, and it ends a decoded caption.
            "clip_used" has only the tokens `words`, for models with a small embedding; `encode` removes all other tokens.
    """

    def __init__(self, words: Sequence[str] = (), layout: ClipLayout = "clip") -> None:
        self.words, self.layout = list(words), layout
        self.family = "clip_released" if layout == "clip_released" else "clip"  # a captioner accepts one family
        self._clip_ids = list(range(clip_tokenizer().vocab_size - 2))  # CLIP's id of each token of this vocabulary
        if layout == "clip_used":
            unknown = [word for word in self.words if word not in clip_tokenizer().encoder]
            if unknown or len(set(self.words)) != len(self.words):
                fault = f"{unknown[0]!r} is not a token of CLIP" if unknown else "a token is duplicated"
                raise ValueError(f"invalid vocabulary: {fault}")
            self._clip_ids = [clip_tokenizer().encoder[word] for word in self.words]
        elif self.words:
            raise ValueError(f"layout {layout} takes no words (it has all tokens of CLIP), got {len(self.words)}")
        self._ids = {clip_id: token_id for token_id, clip_id in enumerate(self._clip_ids)}
        # The last two ids are the start and the end of a caption.
        self._size = len(self._clip_ids) + 2
        self.bos, self.eos = self._size - 2, self._size - 1
        self.pad = 0 if layout == "clip_released" else self._size
        self.unk, self.mask = None, None  # CLIP can encode every text

    def __len__(self) -> int:
        return self._size

    @property
    def clip_ids(self) -> list[int]:
        """Return the CLIP id of each token of this vocabulary, in the order of the tokens' ids."""
        return [*self._clip_ids, self.clip_size - 2, self.clip_size - 1]

    @property
    def clip_size(self) -> int:
        """Size of CLIP's full vocabulary."""
        return clip_tokenizer().vocab_size

    def encode(self, caption: str | Sequence[str], max_length: int) -> list[int]:
        """Turn a caption into at most `max_length` ids: bos, tokens, eos. Further tokens are cut off, and no padding is added."""
        if max_length < 3:
            raise ValueError(f"max_length must be at least 3 (bos, a token, eos), got {max_length}")
        clip_ids = clip_tokenizer().encode(caption if isinstance(caption, str) else " ".join(caption))
        ids = [self._ids[clip_id] for clip_id in clip_ids if clip_id in self._ids]
        return [self.bos, *ids[: max_length - 2], self.eos]

    def decode(self, ids: Iterable[int]) -> str:
        """Turn ids into a sentence, which ends before the first eos or padding."""
        clip_ids = []
        for token_id in map(int, ids):
            if token_id in (self.eos, self.pad):
                break
            if not 0 <= token_id < self._size:
                raise ValueError(f"id {token_id} is outside the vocabulary of {self._size} tokens")
            if token_id != self.bos:
                clip_ids.append(self._clip_ids[token_id])
        return " ".join(clip_tokenizer().decode(clip_ids).split())

    decode_plain = decode  # the two differ only in the vocabulary of a vision-language model, `HubVocabulary`


def build_clip_vocabulary(captions: Iterable[str], layout: ClipLayout) -> ClipVocabulary:
    """Return CLIP's vocabulary; with the layout "clip_used" it has only the tokens of the training captions."""
    if layout != "clip_used":
        return ClipVocabulary((), layout)
    clip_ids = {clip_id for caption in dict.fromkeys(captions) for clip_id in clip_tokenizer().encode(caption)}
    return ClipVocabulary([clip_tokenizer().decoder[clip_id] for clip_id in sorted(clip_ids)], layout)


AnyVocabulary = Vocabulary | ClipVocabulary | HubVocabulary


def restore_vocabulary(words: Sequence[str], layout: AnyLayout) -> AnyVocabulary:
    """Make the vocabulary of a checkpoint from its words and the name of its layout."""
    if layout == "hub":
        raise ValueError("its tokens come with a base model")
    if layout in get_args(ClipLayout):
        return ClipVocabulary(words, layout)  # type: ignore[arg-type]
    return Vocabulary(list(words), layout)  # type: ignore[arg-type]


def build_any_vocabulary(
    captions: Iterable[str],
    min_count: int,
    layout: AnyLayout,
    base: str | None = None,
    base_revision: str | None = None,
) -> AnyVocabulary:
    """Build a vocabulary from training captions.

    A word must occur at least `min_count` times. Tokens of CLIP and of vision-language models may be rarer. For the layout "hub", `base` is
    the vision-language model, which is a folder or a name on the Hugging Face Hub, and `base_revision` is its commit on the Hub.
    """
    if layout == "hub":
        if base is None:
            raise DiffcapError("data.vocabulary_layout is hub, which is for vision-language models; remove the option.")
        from diffcap.checkpoints.base_models import find_base

        processor = load_processor(find_base(base, base_revision).folder)
        template = read_chat_template(processor, "")  # the ids are the same for any question
        return HubVocabulary(processor.tokenizer, template)
    if layout in get_args(ClipLayout):
        return build_clip_vocabulary(captions, layout)  # type: ignore[arg-type]
    return build_vocabulary(captions, min_count, layout)  # type: ignore[arg-type]
