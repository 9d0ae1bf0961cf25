"""Split captions in a script without blanks between words (Chinese, Japanese, Thai, ...) into characters, the tokens of metrics."""

import re
import unicodedata
from collections.abc import Iterable

# Han, kana, and the marks that repeat or lengthen such a letter; Thai, Lao, Tibetan, Burmese and Khmer.
_EAST_ASIAN = "\u3005-\u3007\u3040-\u30ff\u31f0-\u31ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_SOUTH_EAST_ASIAN = "\u0e00-\u109f\u1780-\u17ff"
_LETTERS = _EAST_ASIAN + _SOUTH_EAST_ASIAN
# Vowels and tones that belong to the letter before, in all these scripts.
_MARKS = (
    "\u0300-\u036f\u3099\u309a\u0e31\u0e34-\u0e3a\u0e47-\u0e4e\u0eb1\u0eb4-\u0ebc\u0ec8-\u0ece\u0f71-\u0f84\u0f90-\u0fbc"
    "\u102b-\u103e\u1056-\u1059\u17b4-\u17d3"
)
_LETTER = re.compile(f"[{_LETTERS}]")
_TOKEN = re.compile(rf"[{_LETTERS}][{_MARKS}]*|(?:(?![{_LETTERS}])[\w'\u2019.-])+")
_ADJACENT = re.compile(rf"[{_LETTERS}][{_MARKS}]*(?![{_MARKS}])[{_LETTERS}]")
_LONGER_THAN_WORDS = re.compile(f"[{_EAST_ASIAN}]{{4}}|[{_SOUTH_EAST_ASIAN}]{{8}}")  # most words have fewer letters
_BLANK_BETWEEN = re.compile(rf"(?<=[{_LETTERS}{_MARKS}]) (?=[{_LETTERS}])")


def split_characters(text: str) -> str:
    """Put blanks between such characters. Other words stay whole; letters become small, and punctuation is removed.

    Example:
        >>> split_characters("一个red立方体不见了。")
        '一 个 red 立 方 体 不 见 了'
    """
    tokens = _TOKEN.findall(unicodedata.normalize("NFKC", text).lower())
    return " ".join(filter(None, (token.strip("'\u2019.-") for token in tokens)))


def join_characters(text: str) -> str:
    """Remove the blanks between such characters, unless the text is divided into words.

    Example:
        >>> join_characters("一 个 red 立 方 体")
        '一个 red 立方体'
    """
    return text if _ADJACENT.search(text) else _BLANK_BETWEEN.sub("", text)


def uses_characters(captions: Iterable[str]) -> bool:
    """Return whether the captions of a dataset are compared by characters.

    Over 5 % of them are mostly in such a script, and most of those have no blanks between words, or blanks between all characters.
    """
    texts = [" ".join(text.split()) for text in captions]
    written = [
        text for text in texts if not text.isascii() and 2 * len(_LETTER.findall(text)) > sum(map(str.isalpha, text))
    ]
    num_undivided = sum(
        not _ADJACENT.search(text) or len(_LONGER_THAN_WORDS.findall(text)) > len(_BLANK_BETWEEN.findall(text))
        for text in written
    )
    return 20 * len(written) > len(texts) and 2 * num_undivided > len(written)
