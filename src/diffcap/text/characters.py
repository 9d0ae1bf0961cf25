"""Split captions in a script without blanks between words (Chinese, Japanese, Thai) into characters, the tokens of metrics."""

import re
import unicodedata

# Han, kana, Thai, and the marks that repeat or lengthen such a letter.
_LETTERS = (
    "\u3005-\u3007\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff\u0e00-\u0e7f"
)
_MARKS = (
    "\u0300-\u036f\u3099\u309a\u0e31\u0e34-\u0e3a\u0e47-\u0e4e"  # vowels and tones that belong to the letter before
)
_TOKEN = re.compile(rf"[{_LETTERS}][{_MARKS}]*|(?:(?![{_LETTERS}])[\w'\u2019.-])+")
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
    """Remove the blanks between such characters.

    Example:
        >>> join_characters("一 个 red 立 方 体")
        '一个 red 立方体'
    """
    return _BLANK_BETWEEN.sub("", text)
