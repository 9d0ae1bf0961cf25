"""CLIP's byte-pair encoding (open_clip's) as a vocabulary of captions, whole or cut down to the tokens that occur."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from open_clip.tokenizer import SimpleTokenizer

ClipLayout = Literal["clip", "clip_used", "clip_released"]


@functools.cache
def tokenizer() -> SimpleTokenizer:
    """CLIP's tokenizer: lower case, mended text (ftfy), 49,408 tokens."""
    from open_clip.tokenizer import SimpleTokenizer  # brings torchvision: not for a stage's --help

    return SimpleTokenizer()


class ClipVocabulary:
    """CLIP's tokens as ids, with the interface of `Vocabulary`.

    Args:
        words: of "clip_used", the tokens that have an id, in CLIP's order; else empty, for all of CLIP's.
        layout: "clip": CLIP's ids, padded with an id of its own, 49,408. "clip_released": padded with 0, which is the
            word "!" (authors' code): there it is never learned, and ends a caption. "clip_used": `words` alone, for
            models with a small table of words; tokens without an id are left out of captions.

    Attributes:
        words, layout: as given. family: what a model needs. bos, eos: START and END, the last two ids. pad: see `layout`.
        unk, mask: None; every text has tokens, and none is predicted from a mask.
    """

    def __init__(self, words: Sequence[str] = (), layout: ClipLayout = "clip") -> None:
        self.words, self.layout = list(words), layout
        self.family = "clip_released" if layout == "clip_released" else "clip"
        self._ids: dict[int, int] | None = None
        if layout == "clip_used":
            unknown = [word for word in self.words if word not in tokenizer().encoder]
            if unknown or len(set(self.words)) != len(self.words):
                fault = f"{unknown[0]!r} is no token of CLIP's" if unknown else "a token stands twice"
                raise ValueError(f"the vocabulary does not hold together: {fault}")
            self._clip_ids = [tokenizer().encoder[word] for word in self.words]
            self._ids = {number: place for place, number in enumerate(self._clip_ids)}
        elif self.words:
            raise ValueError(f"layout {layout} has CLIP's own tokens, not {len(self.words)} words")
        self._size = (len(self.words) if layout == "clip_used" else tokenizer().vocab_size - 2) + 2
        self.bos, self.eos = self._size - 2, self._size - 1
        self.pad = 0 if layout == "clip_released" else self._size
        self.unk, self.mask = None, None

    def __len__(self) -> int:
        return self._size

    @property
    def clip_ids(self) -> list[int]:
        """CLIP's id of each of ours."""
        first = self._clip_ids if self._ids is not None else list(range(self._size - 2))
        return [*first, self.clip_size - 2, self.clip_size - 1]

    @property
    def clip_size(self) -> int:
        """Of CLIP's own vocabulary."""
        return tokenizer().vocab_size

    def encode(self, caption: str | Sequence[str], max_length: int) -> list[int]:
        """Turn a caption into ids, without padding: START, the tokens that fit, END.

        Args:
            caption: a sentence, or words to be joined with blanks. max_length: of all ids; tokens beyond are cut off.

        Raises:
            ValueError: `max_length` leaves no room for a token.
        """
        if max_length < 3:
            raise ValueError(f"max_length must be at least 3 (to open, a word, to close), got {max_length}")
        found = tokenizer().encode(caption if isinstance(caption, str) else " ".join(caption))
        ids = found if self._ids is None else [self._ids[number] for number in found if number in self._ids]
        return [self.bos, *ids[: max_length - 2], self.eos]

    def decode(self, ids: Iterable[int]) -> str:
        """Turn ids into a sentence: up to END or padding, tokens joined to words.

        Raises:
            ValueError: an id is outside the vocabulary.
        """
        kept = []
        for number in map(int, ids):
            if number in (self.eos, self.pad):
                break
            if not 0 <= number < self._size:
                raise ValueError(f"id {number} is outside the vocabulary of {self._size} tokens")
            if number != self.bos:
                kept.append(number if self._ids is None else self._clip_ids[number])
        return " ".join(tokenizer().decode(kept).split())


def build_clip_vocabulary(captions: Iterable[str], layout: ClipLayout) -> ClipVocabulary:
    """CLIP's tokens; with "clip_used" those that occur in the training captions."""
    if layout != "clip_used":
        return ClipVocabulary((), layout)
    used = {number for caption in dict.fromkeys(captions) for number in tokenizer().encode(caption)}
    return ClipVocabulary([tokenizer().decoder[number] for number in sorted(used)], layout)
