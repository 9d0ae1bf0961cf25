"""Captions to tokens, in the two ways that the papers score them."""

from collections.abc import Sequence
from typing import Literal, get_args

from diffcap.errors import DiffcapError
from diffcap.evaluation.java import jar, run_java

Tokenizer = Literal["ptb", "raw"]

# Tokens that the COCO caption evaluation drops after PTB tokenisation. Brackets come out as -lrb- and stay: the list has
# them in capitals, and published figures were made with it.
_PUNCTUATION = frozenset(
    ["''", "'", "``", "`", "-LRB-", "-RRB-", "-LCB-", "-RCB-", ".", "?", "!", ",", ":", "-", "--", "...", ";"]
)


def _ptb(lines: list[str]) -> list[str]:
    printed = run_java(
        "the PTB tokeniser",
        "-cp",
        jar("tokenizer/stanford-corenlp-3.4.1.jar"),
        "edu.stanford.nlp.process.PTBTokenizer",
        "-preserveLines",
        "-lowerCase",
        text="\n".join(lines),
    ).split("\n")
    printed += [""] * (len(lines) - len(printed))  # empty lines at the very end are not printed
    if len(printed) != len(lines):
        raise DiffcapError(
            f"the PTB tokeniser made {len(printed):,} lines of {len(lines):,} captions; look for control characters "
            "in the captions, or score with tokenizer raw."
        )
    # Split on the blank alone: the tokeniser joins the parts of "1 1/2" with a no-break space.
    return [" ".join(word for word in line.rstrip().split(" ") if word not in _PUNCTUATION) for line in printed]


def tokenize(captions: Sequence[str], tokenizer: Tokenizer = "ptb") -> list[str]:
    """Turn captions into strings of tokens that are joined by single blanks.

    Args:
        captions: sentences; any white space in them counts as one blank.
        tokenizer: "ptb" lower-cases, splits as the Penn Treebank does and drops punctuation (Stanford's tokeniser, as
            in the COCO caption evaluation; SCORER, DIRL, CLIP4IDC). "raw" takes the blanks as they are (IDC-PCL), so
            punctuation that stands as a token counts.

    Returns:
        One string a caption, in order.

    Raises:
        DiffcapError: the tokeniser is not known, or there is no Java for "ptb".
    """
    if tokenizer not in get_args(Tokenizer):
        raise DiffcapError(f"tokenizer {tokenizer!r} is not known; choose ptb or raw.")
    # Line and paragraph separators of any script would make Stanford's tokeniser print a line more than it read.
    lines = [" ".join(caption.split()) for caption in captions]
    if tokenizer == "raw":
        return lines
    distinct = list(dict.fromkeys(line for line in lines if line))
    tokens = dict(zip(distinct, _ptb(distinct))) if distinct else {}
    return [tokens.get(line, "") for line in lines]
