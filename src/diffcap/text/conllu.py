"""Read and write tagged sentences as CoNLL-U, the format from which Stanza trains taggers."""

from collections.abc import Iterable
from pathlib import Path

from diffcap.records import write_text
from diffcap.utils.errors import DiffcapError

TaggedSentence = list[tuple[str, str]]  # (word, UPOS)
_UPOS = frozenset((
    "ADJ", "ADP", "ADV", "AUX", "CCONJ", "DET", "INTJ", "NOUN", "NUM", "PART", "PRON", "PROPN", "PUNCT", "SCONJ", "SYM",
    "VERB", "X",
))  # fmt: skip


def read_conllu(path: str | Path) -> list[TaggedSentence]:
    """Read the words and UPOS tags of a CoNLL-U file; multi-word tokens and empty nodes are skipped."""
    if not Path(path).is_file():
        raise DiffcapError(f"{path}: no CoNLL-U file there; check the path.")
    sentences: list[TaggedSentence] = [[]]
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise DiffcapError(f"{path}: not UTF-8 text (byte {error.start}); give a CoNLL-U file.") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            sentences.append([])
        elif not line.startswith("#"):
            columns = line.rstrip("\r").split("\t")
            if len(columns) != 10:
                raise DiffcapError(f"{path}, line {number}: {len(columns)} columns instead of 10; fix that line.")
            if not columns[1]:
                raise DiffcapError(f"{path}, line {number}: the word (column 2) is empty; fix that line.")
            if not columns[0].isdigit():
                continue  # "3-4", a multi-word token, or "5.1", an empty node
            if columns[3] not in _UPOS:
                raise DiffcapError(f"{path}, line {number}: {columns[3]!r} is not a UPOS tag; fix column 4.")
            sentences[-1].append((columns[1].replace(" ", "_"), columns[3]))
    non_empty = [sentence for sentence in sentences if sentence]
    if not non_empty:
        raise DiffcapError(f"{path}: the file has no tagged word; give a CoNLL-U file.")
    return non_empty


def write_conllu(path: str | Path, sentences: Iterable[TaggedSentence]) -> None:
    """Write sentences with their UPOS tags; the syntax tree is a placeholder in which every word depends on the first."""
    blocks = []
    for sentence in sentences:
        rows = []
        for number, (word, tag) in enumerate(sentence, 1):
            head, relation = (0, "root") if number == 1 else (1, "dep")
            rows.append(f"{number}\t{word}\t_\t{tag}\t_\t_\t{head}\t{relation}\t_\t_\n")
        blocks.append("".join(rows) + "\n")
    write_text(path, "".join(blocks))
