"""Find and load part-of-speech taggers of the library Stanza, and read and write tagged sentences in CoNLL-U, a text format."""

import gc
import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from diffcap.records import file_hash, read_json, write_text
from diffcap.utils.errors import DiffcapError, wrap_errors

SHIPPED_TAGGERS = {path.name.removesuffix("_tagger"): path for path in sorted(Path(__file__).parent.glob("*_tagger"))}
_FOLDER_FORMAT = "a tagger's folder holds resources.json and one .pt file; `make shipped NAME=tagger` trains a tagger"

TaggedSentence = list[tuple[str, str]]  # (word, UPOS tag) of each word; UPOS is the universal set of parts of speech
_UPOS_TAGS = "ADJ ADP ADV AUX CCONJ DET INTJ NOUN NUM PART PRON PROPN PUNCT SCONJ SYM VERB X"

# Arguments of `stanza.Pipeline`. Stanza sorts the sentences of a call by length, so large batches have little padding.
_SETTINGS: dict[str, Any] = {
    "processors": "tokenize,pos",
    "tokenize_pretokenized": True,
    "use_gpu": True,  # if there is a GPU
    "logging_level": "CRITICAL",  # errors are reported once, by DiffcapError
    "pos_batch_size": 1000,
    "pos_batch_maximum_tokens": 10000,
}


@dataclass(frozen=True)
class TaggerModel:
    """A tagger whose files are on this machine."""

    name: str  # as the user gave it: "english", "blocks" or a folder
    identity: str  # hash of the weights; a cache of tags stores it to detect another tagger
    options: dict[str, Any] = field(default_factory=dict)  # arguments of `stanza.Pipeline` that name the local files


def find_tagger(tagger: str) -> TaggerModel:
    """Find a tagger's files; Stanza downloads "english" at first use.

    `tagger` is "english" (Stanza's English model), "blocks" or "tiles" (small taggers in this package, for captions of these datasets),
    or a folder with `resources.json` and one `.pt` file.
    """
    if tagger == "english":
        return _find_english_tagger()
    folder = SHIPPED_TAGGERS.get(tagger) or Path(tagger)
    if not folder.is_dir():
        raise DiffcapError(
            f"{folder}: no such tagger; give english, {', '.join(SHIPPED_TAGGERS)}, or a folder with resources.json and one .pt file."
        )
    pt_files = sorted(folder.glob("*.pt"))
    if len(pt_files) != 1:
        raise DiffcapError(f"{folder}: {len(pt_files)} .pt files instead of one; {_FOLDER_FORMAT}.")
    resources = read_json(folder / "resources.json", "list of Stanza's resources", _FOLDER_FORMAT)
    options: dict[str, Any] = {"lang": next(iter(resources)), "dir": str(folder), "pos_model_path": str(pt_files[0])}
    # These options would name further files, such as pretrained word vectors. They are None, because the tagger has no such files.
    options |= dict.fromkeys(("pos_pretrain_path", "pos_forward_charlm_path", "pos_backward_charlm_path"))
    return TaggerModel(tagger, file_hash(pt_files[0]), options)


def load_pipeline(model: TaggerModel) -> Any:
    """Load the `stanza.Pipeline` of a tagger, on a GPU if there is one."""
    import stanza

    where = model.options.get("pos_model_path", model.name)
    remedy = "download its files again, or run `make shipped NAME=tagger`, which trains a tagger"
    with wrap_errors(where, "Stanza cannot load this tagger", remedy):  # a truncated file fails in many ways
        return stanza.Pipeline(**_SETTINGS, **model.options, download_method=None)


def tag_batch(pipeline: Any, sentences: Sequence[str]) -> list[list[str]]:
    """Return the UPOS tags of sentences whose words are joined with single spaces: one list per sentence, one tag per word."""
    words = [sentence.split(" ") for sentence in sentences]
    # Stanza creates dozens of objects per word, so garbage collection during the call would take half of the time of the call.
    gc.disable()
    gc.freeze()  # keeps older objects out of the collection below
    try:
        tags = [[word.upos or "X" for word in sentence.words] for sentence in pipeline(words).sentences]
    finally:
        gc.collect()  # frees the words and sentences of Stanza's document, which refer to each other
        gc.unfreeze()
        gc.enable()
    if list(map(len, tags)) != list(map(len, words)):
        raise RuntimeError("Stanza returned another number of words than it was given")
    return tags


@cache  # to find the files, the pipeline must be loaded, which takes seconds
def _find_english_tagger() -> TaggerModel:
    import stanza

    options = {"lang": "en"}
    remedy = (
        "connect to the internet once, give the folder of a local tagger (resources.json and one .pt file) as TAGGER=FOLDER, or use "
        "TAGGER=blocks, the small tagger that ships with diffcap (OFFLINE=yes chooses it, too)"
    )
    with wrap_errors("Stanza's English tagger", "it is not on this machine and cannot be downloaded", remedy):
        pipeline = stanza.Pipeline(**_SETTINGS, **options, download_method=stanza.DownloadMethod.REUSE_RESOURCES)
    paths = [path for key, path in sorted(pipeline.config.items()) if re.fullmatch("pos_.*_path", key) and path]
    pt_files = [Path(path) for path in paths if Path(path).is_file()]
    identity = hashlib.sha256("".join(file_hash(file) for file in pt_files).encode()).hexdigest()
    return TaggerModel("english", identity, options)


def read_conllu(path: str | Path) -> list[TaggedSentence]:
    """Read the words and UPOS tags of a CoNLL-U file; multi-word tokens and empty nodes are skipped."""
    from stanza.utils.conll import CoNLL

    with Path(path).open(encoding="utf-8") as file, wrap_errors(path, "not a CoNLL-U file", "correct or replace it"):
        content, _ = CoNLL.load_conll(file)
    words = ([row for row in rows if row[0].isdigit()] for rows in content)  # not "3-4", a multi-word token
    sentences = [[(row[1].replace(" ", "_"), row[3]) for row in rows] for rows in words if rows]
    if not sentences:
        raise DiffcapError(f"{path}: the file has no tagged word; give a CoNLL-U file.")
    for word, tag in (pair for sentence in sentences for pair in sentence):
        if tag not in _UPOS_TAGS.split():
            raise DiffcapError(f"{path}: the tag {tag!r} of {word!r} is not a UPOS tag; fix column 4.")
    return sentences


def write_conllu(path: str | Path, sentences: Iterable[TaggedSentence]) -> None:
    """Write sentences as CoNLL-U, from which Stanza trains taggers. The syntax columns are placeholders: words depend on word 1."""
    texts = []
    for sentence in sentences:
        lines = []
        for number, (word, tag) in enumerate(sentence, 1):
            head, relation = (0, "root") if number == 1 else (1, "dep")
            lines.append(f"{number}\t{word}\t_\t{tag}\t_\t_\t{head}\t{relation}\t_\t_\n")
        texts.append("".join(lines) + "\n")
    write_text(path, "".join(texts))
