"""The word vocabulary of PCL, SCORER and DIRL captions: tokens, ids, and back (IDC-PCL, authors' code)."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from diffcap.errors import DiffcapError
from diffcap.records import read_json, write_json

SPECIALS = ("<PAD>", "<BOS>", "<EOS>", "<UNK>", "<CLS>", "<MASK>")  # ids 0..5; BOS 1 and MASK 5 as in the authors' code

# The double backquote is one token in the public Birds-to-Words files; every other punctuation mark stands alone.
_TOKEN = re.compile(r"``|[^\W_]+|[^\w\s]|_")
_ANIMAL = re.compile(r"\banimal\s+([12])\b")  # "Animal 1" of the Birds-to-Words annotators


def tokenize(text: str) -> list[str]:
    """Split a sentence into lower-case words and single punctuation marks; "animal 1" becomes "animal1".

    Joining the tokens with blanks and splitting again gives the same tokens.
    """
    return _TOKEN.findall(_ANIMAL.sub(r"animal\1", " ".join(_TOKEN.findall(text.lower()))))


class Vocabulary:
    """Ids of words: the six of `SPECIALS`, then `words` in the order given.

    Attributes:
        words: the words after the specials, a plain list, so that a checkpoint can store it.

    Raises:
        ValueError: a word stands twice, or is one of the specials.
    """

    def __init__(self, words: list[str]) -> None:
        self.words = list(words)
        self._tokens = [*SPECIALS, *self.words]
        self._ids = {word: number for number, word in enumerate(self._tokens)}
        if len(self._ids) != len(self._tokens):
            repeated = next(word for word, count in Counter(self._tokens).items() if count > 1)
            raise ValueError(f"the word {repeated!r} stands twice in the vocabulary, or is one of its special tokens")

    @property
    def pad(self) -> int:
        """Id of the padding."""
        return 0

    @property
    def bos(self) -> int:
        """Id of the token before the first word."""
        return 1

    @property
    def eos(self) -> int:
        """Id of the token after the last word."""
        return 2

    @property
    def unk(self) -> int:
        """Id that stands for every word outside the vocabulary."""
        return 3

    @property
    def cls(self) -> int:
        """Id of the sentence token."""
        return 4

    @property
    def mask(self) -> int:
        """Id of the token to be predicted."""
        return 5

    def __len__(self) -> int:
        return len(self._tokens)

    def encode(self, caption: str | Sequence[str], max_length: int) -> list[int]:
        """Turn a caption into ids, without padding.

        Args:
            caption: a sentence, split by `tokenize`; or tokens, taken as they are.
            max_length: length of the padded sequence that the ids go into. Words after the first `max_length - 3` are
                cut off (authors' code: room for BOS, EOS and one more).

        Returns:
            BOS, the words, EOS: at most `max_length - 1` ids; unknown words as UNK.

        Raises:
            ValueError: `max_length` leaves no room for a word.
        """
        if max_length < 4:
            raise ValueError(f"max_length must be at least 4 (BOS, a word, EOS and one more), got {max_length}")
        tokens = tokenize(caption) if isinstance(caption, str) else caption
        return [self.bos, *(self._ids.get(token, self.unk) for token in tokens[: max_length - 3]), self.eos]

    def decode(self, ids: Iterable[int]) -> str:
        """Turn ids into a sentence: up to the first EOS, words joined with blanks, no specials but <UNK>.

        Args:
            ids: one sequence, with or without BOS and padding; numbers or a 1-D tensor.

        Raises:
            ValueError: an id is outside the vocabulary.
        """
        words = []
        for number in map(int, ids):
            if number == self.eos:
                break
            if not 0 <= number < len(self._tokens):
                raise ValueError(f"id {number} is outside the vocabulary of {len(self._tokens)} tokens")
            if number >= len(SPECIALS) or number == self.unk:
                words.append(self._tokens[number])
        return " ".join(words)


def build_vocabulary(captions: Iterable[str | Sequence[str]], min_count: int = 1) -> Vocabulary:
    """Collect the words that occur at least `min_count` times, in sorted order.

    Args:
        captions: the training captions: sentences, split by `tokenize`, or lists of tokens, taken as they are.
        min_count: 1 for CLEVR-Change and blocks, 2 for Birds-to-Words.
    """
    counts: Counter[str] = Counter()
    for caption in captions:
        counts.update(tokenize(caption) if isinstance(caption, str) else caption)
    return Vocabulary(sorted(word for word, count in counts.items() if count >= min_count and word not in SPECIALS))


def write_vocabulary(path: str | Path, vocabulary: Vocabulary) -> None:
    """Write `vocabulary.json`: the specials, for readers of other programs, and the words that follow them."""
    write_json(path, {"specials": list(SPECIALS), "words": vocabulary.words})


def read_vocabulary(path: str | Path) -> Vocabulary:
    """Read a file of `write_vocabulary`.

    Raises:
        DiffcapError: the file is missing, not JSON, or not a vocabulary.
    """
    value = read_json(path, "vocabulary", "write it with `make data DATASET=<name>`")
    words = value.get("words") if isinstance(value, dict) else None
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise DiffcapError(f'{path}: "words" must be a list of strings; write the file again with `make data`.')
    if value.get("specials") != list(SPECIALS):
        raise DiffcapError(f'{path}: "specials" must be {", ".join(SPECIALS)}; write the file again with `make data`.')
    try:
        return Vocabulary(words)
    except ValueError as error:
        raise DiffcapError(f"{path}: {error}; write the file again with `make data`.") from None
