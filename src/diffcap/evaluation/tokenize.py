"""Tokenisation of captions for the metrics, in the two ways that the papers use."""

from collections.abc import Sequence
from typing import Literal, get_args

from diffcap.evaluation.java import jar, run_java
from diffcap.utils.errors import DiffcapError

Tokenizer = Literal["ptb", "raw"]

# Tokens that the COCO caption evaluation removes after PTB tokenisation. The tokeniser writes brackets in lower case (-lrb-), so they
# are not removed; this is kept because published scores have been computed so.
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
            f"the PTB tokeniser returned {len(printed):,} lines for {len(lines):,} captions; remove control characters "
            "from the captions, or score with the tokenizer raw."
        )
    # Split at spaces only: the tokeniser joins the parts of "1 1/2" with a no-break space.
    return [" ".join(word for word in line.rstrip().split(" ") if word not in _PUNCTUATION) for line in printed]


def tokenize(captions: Sequence[str], tokenizer: Tokenizer = "ptb") -> list[str]:
    """Tokenise captions.

    Args:
        tokenizer: "ptb": lower case, Penn Treebank tokens, without punctuation (Stanford's tokeniser, as in the COCO caption
            evaluation; SCORER, DIRL, CLIP4IDC); needs Java. "raw": split at white space (IDC-PCL), so a punctuation mark
            between spaces is a token.

    Returns:
        Tokens joined with single spaces, one string per caption.

    Example:
        >>> tokenize(["The  cube moved ."], "raw")
        ['The cube moved .']
        >>> tokenize(["The  cube moved."], "ptb")  # needs Java # doctest: +SKIP
        ['the cube moved']
    """
    if tokenizer not in get_args(Tokenizer):
        raise DiffcapError(f"tokenizer {tokenizer!r} is not known; choose ptb or raw.")
    # Unicode line and paragraph separators would make Stanford's tokeniser print more lines than it read.
    lines = [" ".join(caption.split()) for caption in captions]
    if tokenizer == "raw":
        return lines
    distinct = list(dict.fromkeys(line for line in lines if line))
    tokens = dict(zip(distinct, _ptb(distinct))) if distinct else {}
    return [tokens.get(line, "") for line in lines]
