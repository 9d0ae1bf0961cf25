"""The word vocabularies of PCL, SCORER and DIRL captions: tokens, ids, and back.

Two layouts, each as its authors' code has it: special tokens and their ids, how a sentence is cut into words, and how much
room is left behind it.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from diffcap.errors import DiffcapError
from diffcap.records import json_text, read_json, update_text

SPECIALS = ("<PAD>", "<BOS>", "<EOS>", "<UNK>", "<CLS>", "<MASK>")  # ids 0..5; BOS 1 and MASK 5 as in IDC-PCL's code
LayoutName = Literal["pcl", "rcc", "rcc_tokens"]

_TOKEN = re.compile(r"``|[^\W_]+|[^\w\s]|_")
_ANIMAL = re.compile(r"\banimal\s+([12])\b")  # "Animal 1" of the Birds-to-Words annotators


def tokenize(text: str) -> list[str]:
    """Split a sentence into lower-case words and single punctuation marks; "animal 1" becomes "animal1".

    Joining the tokens with blanks and splitting again gives the same tokens.
    """
    return _TOKEN.findall(_ANIMAL.sub(r"animal\1", " ".join(_TOKEN.findall(text.lower()))))


def tokenize_rcc(text: str) -> list[str]:
    """Cut a sentence as SCORER's and DIRL's code base (RobustChangeCaptioning) does.

    Commas and semicolons stand alone, full stops and question marks go, and every single blank separates: two blanks in a
    row give an empty word, which the released vocabularies hold. Case stays.
    """
    for mark in ";,":
        text = text.replace(mark, f" {mark}")
    for mark in "?.":
        text = text.replace(mark, "")
    return text.split(" ")


class Layout(NamedTuple):
    """How a code base numbers its words.

    Attributes:
        family: of layouts with the same ids, so that a model made for one can be trained with another.
        specials: tokens of the ids 0, 1, ...; the first is padding. begin, end, unknown: which of them open and close a
            caption and stand for other words. tokenize: sentence to words. spare: positions left free behind a caption.
        padding_ends: padding closes a caption, too, when ids are turned into words (authors' code of "rcc").
    """

    family: str
    specials: tuple[str, ...]
    begin: str
    end: str
    unknown: str
    tokenize: Callable[[str], list[str]]
    spare: int
    padding_ends: bool


_RCC = Layout(
    "rcc",
    ("<NULL>", "<UNK>", "<START>", "<END>"),
    "<START>",
    "<END>",
    "<UNK>",
    tokenize_rcc,
    spare=0,
    padding_ends=True,
)
LAYOUTS: dict[LayoutName, Layout] = {
    # authors' code: room for one more
    "pcl": Layout("pcl", SPECIALS, "<BOS>", "<EOS>", "<UNK>", tokenize, spare=1, padding_ends=False),
    "rcc": _RCC,
    "rcc_tokens": _RCC._replace(tokenize=str.split),  # for captions that are tokens already, joined with blanks
}


class Vocabulary:
    """Ids of words: the specials of a layout, then `words` in the order given.

    Attributes:
        words: the words after the specials, a plain list, so that a checkpoint can store it. layout: "pcl", or "rcc" and
            "rcc_tokens" (SCORER and DIRL), see `LAYOUTS`. family: what a model needs, see `Layout`.
        pad, bos, eos, unk: ids. mask: id of the token to be predicted,
            None where there is none.

    Raises:
        ValueError: a word stands twice, or is one of the specials.
    """

    def __init__(self, words: list[str], layout: LayoutName = "pcl") -> None:
        self.words, self.layout = list(words), layout
        self._form = LAYOUTS[layout]
        self.family = self._form.family
        self._tokens = [*self._form.specials, *self.words]
        self._ids = {word: number for number, word in enumerate(self._tokens)}
        if len(self._ids) != len(self._tokens):
            repeated = next(word for word, count in Counter(self._tokens).items() if count > 1)
            raise ValueError(f"the word {repeated!r} stands twice in the vocabulary, or is one of its special tokens")
        self.pad = 0
        self.bos, self.eos = self._ids[self._form.begin], self._ids[self._form.end]
        self.unk = self._ids[self._form.unknown]
        self.mask = self._ids["<MASK>"] if "<MASK>" in self._form.specials else None

    def __len__(self) -> int:
        return len(self._tokens)

    def encode(self, caption: str | Sequence[str], max_length: int) -> list[int]:
        """Turn a caption into ids, without padding.

        Args:
            caption: a sentence, cut as the layout does; or tokens, taken as they are.
            max_length: length of the padded sequence that the ids go into; words that do not fit are cut off.

        Returns:
            The opening token, the words, the closing token: at most `max_length` ids less the layout's `spare`; unknown
            words as UNK.

        Raises:
            ValueError: `max_length` leaves no room for a word.
        """
        room = max_length - 2 - self._form.spare
        if room < 1:
            least = 3 + self._form.spare
            raise ValueError(f"max_length must be at least {least} (to open, a word, to close), got {max_length}")
        tokens = self._form.tokenize(caption) if isinstance(caption, str) else caption
        return [self.bos, *(self._ids.get(token, self.unk) for token in tokens[:room]), self.eos]

    def decode(self, ids: Iterable[int]) -> str:
        """Turn ids into a sentence: up to the first closing token, words joined with blanks, no specials but unknown words.

        `encode(sentence.split(" "), ...)` gives the ids again.

        Args:
            ids: one sequence, with or without the opening token and padding; numbers or a 1-D tensor.

        Raises:
            ValueError: an id is outside the vocabulary.
        """
        words = []
        for number in map(int, ids):
            if number == self.eos or (number == self.pad and self._form.padding_ends):
                break
            if not 0 <= number < len(self._tokens):
                raise ValueError(f"id {number} is outside the vocabulary of {len(self._tokens)} tokens")
            if number >= len(self._form.specials) or number == self.unk:
                words.append(self._tokens[number])
        return " ".join(words)


def build_vocabulary(
    captions: Iterable[str | Sequence[str]], min_count: int = 1, layout: LayoutName = "pcl"
) -> Vocabulary:
    """Collect the words that occur at least `min_count` times, in sorted order.

    Args:
        captions: the training captions: sentences, cut as the layout does, or lists of tokens, taken as they are.
        min_count: 1 for CLEVR-Change and blocks, 2 for Birds-to-Words.
        layout: see `LAYOUTS`.
    """
    form = LAYOUTS[layout]
    counts: Counter[str] = Counter()
    for caption in captions:
        counts.update(form.tokenize(caption) if isinstance(caption, str) else caption)
    words = sorted(word for word, count in counts.items() if count >= min_count and word not in form.specials)
    return Vocabulary(words, layout)


def write_vocabulary(path: str | Path, vocabulary: Vocabulary) -> None:
    """Write `vocabulary.json`: the specials, for readers of other programs, and the words that follow them.

    A file with the same content is not written again.
    """
    update_text(Path(path), json_text({"specials": list(SPECIALS), "words": vocabulary.words}))


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
