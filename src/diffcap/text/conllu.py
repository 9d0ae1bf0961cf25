"""Tagged sentences in CoNLL-U, the form that Stanza trains its taggers from."""

from collections.abc import Iterable
from pathlib import Path

from diffcap.errors import DiffcapError
from diffcap.records import write_text

TaggedSentence = list[tuple[str, str]]  # (word, UPOS)
_UPOS = frozenset((
    "ADJ", "ADP", "ADV", "AUX", "CCONJ", "DET", "INTJ", "NOUN", "NUM", "PART", "PRON", "PROPN", "PUNCT", "SCONJ", "SYM",
    "VERB", "X",
))  # fmt: skip


def read_conllu(path: str | Path) -> list[TaggedSentence]:
    """Read the words and UPOS tags of a CoNLL-U file; multi-word tokens and empty nodes are left out.

    Raises:
        DiffcapError: the file is missing or empty, or a line is not of CoNLL-U's ten columns with a UPOS tag.
    """
    path = Path(path)
    if not path.is_file():
        raise DiffcapError(f"{path}: no CoNLL-U file there; check the path.")
    sentences: list[TaggedSentence] = [[]]
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise DiffcapError(f"{path}: not UTF-8 text (byte {error.start}); give a CoNLL-U file.") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            sentences.append([])
        elif not line.startswith("#"):
            columns = line.rstrip("\r").split("\t")
            if len(columns) != 10 or not columns[1]:
                raise DiffcapError(f"{path}, line {number}: {len(columns)} columns, not CoNLL-U's ten; fix that line.")
            if not columns[0].isdigit():
                continue  # "3-4", a multi-word token, or "5.1", an empty node
            if columns[3] not in _UPOS:
                raise DiffcapError(f"{path}, line {number}: {columns[3]!r} is no UPOS tag; fix the fourth column.")
            sentences[-1].append((columns[1].replace(" ", "_"), columns[3]))
    found = [sentence for sentence in sentences if sentence]
    if not found:
        raise DiffcapError(f"{path}: holds no tagged word; give a CoNLL-U file.")
    return found


def write_conllu(path: str | Path, sentences: Iterable[TaggedSentence]) -> None:
    """Write sentences with their UPOS tags; the tree columns hold a flat placeholder."""
    blocks = []
    for sentence in sentences:
        rows = []
        for place, (word, tag) in enumerate(sentence, 1):
            head, relation = (0, "root") if place == 1 else (1, "dep")
            rows.append(f"{place}\t{word}\t_\t{tag}\t_\t_\t{head}\t{relation}\t_\t_\n")
        blocks.append("".join(rows) + "\n")
    write_text(path, "".join(blocks))
