"""Caption vocabularies and the part-of-speech tagger."""

from diffcap.text.vocabulary import (
    SPECIALS,
    Vocabulary,
    build_vocabulary,
    read_vocabulary,
    tokenize,
    write_vocabulary,
)

__all__ = ["SPECIALS", "Vocabulary", "build_vocabulary", "read_vocabulary", "tokenize", "write_vocabulary"]
