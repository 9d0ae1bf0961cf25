"""Word vocabularies: convert captions to ids and ids to captions.

A layout defines the special tokens, their ids, and how a caption is split into words, as the code of a method's authors does.
In the layout "rcc" (RobustChangeCaptioning), the ids are <NULL> 0, <UNK> 1, <START> 2, <END> 3, then the words in alphabetical order.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from diffcap.records import json_text, update_text

LayoutName = Literal["pcl", "rcc", "rcc_tokens", "rsicc", "chg2cap"]  # named after the methods' code
DEFAULT_LAYOUT: LayoutName = "pcl"

_TOKEN_PATTERN = re.compile(r"``|[^\W_]+|[^\w\s]|_")
_ANIMAL_PATTERN = re.compile(r"\banimal\s+([12])\b")  # "Animal 1" of the Birds-to-Words annotators


def tokenize(text: str) -> list[str]:
    """Split a sentence into lower-case words and single punctuation marks; "animal 1" becomes "animal1".

    The tokens stay the same if they are joined with spaces and split again.
    """
    return _TOKEN_PATTERN.findall(_ANIMAL_PATTERN.sub(r"animal\1", " ".join(_TOKEN_PATTERN.findall(text.lower()))))


def tokenize_rcc(text: str) -> list[str]:
    """Split a sentence like the code of RobustChangeCaptioning, on which SCORER and DIRL are based.

    Commas and semicolons become tokens, full stops and question marks are removed, and the case is kept. The text is split
    at every single space: two consecutive spaces give an empty token, which is in the authors' vocabularies.
    """
    return re.sub("[.?]", "", re.sub("([,;])", r" \1", text)).split(" ")


def tokenize_rcc_words(text: str) -> list[str]:
    """Split a sentence as Chg2Cap does: like `tokenize_rcc`, but without empty tokens."""
    return [token for token in tokenize_rcc(text) if token]


class Layout(NamedTuple):
    """The rules of a vocabulary, see the top of the file."""

    family: str  # layouts of one family have the same special tokens, so a model can use any of these layouts
    specials: tuple[str, ...]  # the special tokens with the ids 0, 1, ...; the first one is padding
    bos: str  # the special token at the beginning of a caption
    eos: str  # the special token at the end of a caption
    unk: str  # the special token for unknown words
    tokenize: Callable[[str], list[str]]
    num_reserved: int = 0  # positions at the end of a sequence that stay empty (as in IDC-PCL's code)
    padding_is_eos: bool = False  # True: padding ends a caption when ids are decoded (as in the code of "rcc")
    last_specials: tuple[str, ...] = ()  # the special tokens whose ids follow those of the words
    scores_ids: bool = False  # True: the authors' evaluation compares the ids of words instead of text
    sorts_words: bool = True  # False: `build_vocabulary` keeps the words in the order of their first appearance


_RCC_SPECIALS = ("<NULL>", "<UNK>", "<START>", "<END>")
_RCC = Layout("rcc", _RCC_SPECIALS, "<START>", "<END>", "<UNK>", tokenize_rcc, padding_is_eos=True)
_PCL_SPECIALS = ("<PAD>", "<BOS>", "<EOS>", "<UNK>", "<CLS>", "<MASK>")
# RSICCformer's code takes the tokens from its dataset's file. diffcap's captions of this dataset are these tokens, joined with spaces.
_RSICC_LAST = ("<unk>", "<start>", "<end>")
_RSICC = Layout("rsicc", ("<pad>",), "<start>", "<end>", "<unk>", str.split, last_specials=_RSICC_LAST)
LAYOUTS: dict[LayoutName, Layout] = {
    "pcl": Layout("pcl", _PCL_SPECIALS, "<BOS>", "<EOS>", "<UNK>", tokenize, num_reserved=1),
    "rcc": _RCC,
    "rcc_tokens": _RCC._replace(tokenize=str.split),  # for captions that are already tokenised, joined with spaces
    "rsicc": _RSICC._replace(scores_ids=True, sorts_words=False),
    "chg2cap": _RCC._replace(family="chg2cap", tokenize=tokenize_rcc_words, padding_is_eos=False, scores_ids=True),
}


class Vocabulary:
    """Ids of words: the special tokens of a layout, `words` in the given order, then the layout's last special tokens."""

    def __init__(self, words: list[str], layout: LayoutName = DEFAULT_LAYOUT) -> None:
        self.words, self.layout = list(words), layout  # both are stored in checkpoints
        self._rules = LAYOUTS[layout]
        self.family = self._rules.family  # a captioner accepts vocabularies of one family only
        self.tokens = [*self._rules.specials, *self.words, *self._rules.last_specials]  # in the order of their ids
        self._ids = {token: token_id for token_id, token in enumerate(self.tokens)}
        if len(self._ids) != len(self.tokens):
            repeated = next(word for word, count in Counter(self.tokens).items() if count > 1)
            raise ValueError(f"the word {repeated!r} is duplicated in the vocabulary, or is one of its special tokens")
        self.pad = 0
        self.unk = self._ids[self._rules.unk]
        self.bos = self._ids[self._rules.bos]
        self.eos = self._ids[self._rules.eos]
        self.mask = self._ids["<MASK>"] if "<MASK>" in self._rules.specials else None

    def __len__(self) -> int:
        return len(self.tokens)

    def encode(self, caption: str | Sequence[str], max_length: int) -> list[int]:
        """Turn a caption (a sentence or a list of tokens) into at most `max_length` ids: bos, the words, eos, without padding."""
        max_words = max_length - 2 - self._rules.num_reserved
        if max_words < 1:
            least = 3 + self._rules.num_reserved
            raise ValueError(f"max_length must be at least {least} for the layout {self.layout}, got {max_length}")
        tokens = self._rules.tokenize(caption) if isinstance(caption, str) else caption
        ids = [self._ids.get(token, self.unk) for token in tokens[:max_words]]
        return [self.bos, *ids, self.eos]

    def decode(self, ids: Iterable[int]) -> str:
        """Turn ids into words joined with spaces, up to the first eos; special tokens other than `unk` are left out."""
        words = []
        first_word_id = len(self._rules.specials)
        for token_id in map(int, ids):
            if token_id == self.eos or (token_id == self.pad and self._rules.padding_is_eos):
                break
            if not 0 <= token_id < len(self.tokens):
                raise ValueError(f"id {token_id} is outside the vocabulary of {len(self.tokens)} tokens")
            if first_word_id <= token_id < first_word_id + len(self.words) or token_id == self.unk:
                words.append(self.tokens[token_id])
        return " ".join(words)

    decode_plain = decode  # the two differ only in the vocabulary of a vision-language model, `HubVocabulary`


def build_vocabulary(
    captions: Iterable[str | Sequence[str]], min_count: int = 1, layout: LayoutName = DEFAULT_LAYOUT
) -> Vocabulary:
    """Return a vocabulary of the words that occur at least `min_count` times, in the order of the layout.

    Args:
        captions: sentences, which the layout tokenises, or lists of tokens.
        min_count: the papers use 1 for CLEVR-Change and 2 for Birds-to-Words; on LEVIR-CC, RSICCformer's code uses 6 and Chg2Cap's 5.
    """
    rules = LAYOUTS[layout]
    counts: Counter[str] = Counter()
    for caption in captions:
        counts.update(rules.tokenize(caption) if isinstance(caption, str) else caption)
    specials = {*rules.specials, *rules.last_specials}
    words = [word for word, count in counts.items() if count >= min_count and word not in specials]
    return Vocabulary(sorted(words) if rules.sorts_words else words, layout)


def write_vocabulary(path: str | Path, vocabulary: Vocabulary) -> None:
    """Write `vocabulary.json`: the special tokens (for other programs) and the words. An unchanged file is not touched."""
    update_text(Path(path), json_text({"specials": LAYOUTS[vocabulary.layout].specials, "words": vocabulary.words}))
