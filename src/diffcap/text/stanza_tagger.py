"""Find and load a Stanza part-of-speech tagger: the one in this package, a local folder, or Stanza's English model."""

import errno
import gc
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from diffcap.records import file_hash, read_json
from diffcap.utils.errors import DiffcapError

SHIPPED = {path.name.removesuffix("_tagger"): path for path in sorted(Path(__file__).parent.glob("*_tagger"))}
_FOLDER_FORMAT = "a tagger's folder holds resources.json and one .pt file, as `make shipped NAME=tagger` writes it"


@dataclass(frozen=True)
class TaggerModel:
    """A tagger whose files are on this machine."""

    name: str  # as the user gave it: "english", "blocks" or a folder
    identity: str  # hash of the weights; cached tags with another identity are of another tagger
    options: dict[str, Any] = field(default_factory=dict)  # of `stanza.Pipeline`, to load it without network access


def find_tagger(tagger: str) -> TaggerModel:
    """Find a tagger's files; "english" is downloaded by Stanza if it is not on this machine yet.

    Args:
        tagger: "english" (Stanza's English model), "blocks" or "tiles" (the small taggers in this package, for captions of
            these datasets), or a folder with `resources.json` and one `.pt` file.
    """
    if tagger == "english":
        return _english()
    folder = SHIPPED.get(tagger) or Path(tagger)
    if not folder.is_dir():
        raise DiffcapError(
            f"{folder}: no such tagger; give english, {', '.join(SHIPPED)}, or a folder with resources.json and one .pt file."
        )
    models = sorted(folder.glob("*.pt"))
    if len(models) != 1:
        raise DiffcapError(f"{folder}: {len(models)} .pt files instead of one; {_FOLDER_FORMAT}.")
    resources = read_json(folder / "resources.json", "list of Stanza's resources", _FOLDER_FORMAT)
    if not isinstance(resources, dict) or not resources:
        raise DiffcapError(f"{folder / 'resources.json'}: the list of languages is empty; {_FOLDER_FORMAT}.")
    options = {
        "lang": next(iter(resources)),
        "dir": str(folder),
        "pos_model_path": str(models[0]),
        "pos_pretrain_path": None,
        "pos_forward_charlm_path": None,
        "pos_backward_charlm_path": None,
    }
    return TaggerModel(tagger, file_hash(models[0]), options)


def load_pipeline(model: TaggerModel) -> Any:
    """Load the `stanza.Pipeline` of a tagger, on a GPU where there is one."""
    import stanza

    try:
        return stanza.Pipeline(**_COMMON, **model.options, download_method=None)
    except Exception as error:  # a truncated or foreign file fails in many ways inside torch and Stanza
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise DiffcapError(
            f"{model.options.get('pos_model_path', model.name)}: Stanza cannot load this tagger ({reason}); download it again, "
            "or train one with `make shipped NAME=tagger`."
        ) from None


def tag_batch(pipeline: Any, sentences: Sequence[str]) -> list[list[str]]:
    """Return the UPOS tags of sentences whose words are joined with single spaces: one list per sentence, one tag per word."""
    words = [sentence.split(" ") for sentence in sentences]
    # Stanza creates dozens of objects per word: collecting garbage before the end would take half of the time.
    gc.disable()
    gc.freeze()
    try:
        tags = [[word.upos or "X" for word in sentence.words] for sentence in pipeline(words).sentences]
    finally:
        gc.collect()  # the words and sentences of Stanza's document refer to each other
        gc.unfreeze()
        gc.enable()
    if list(map(len, tags)) != list(map(len, words)):
        raise RuntimeError("Stanza returned another number of words than it was given")
    return tags


# Stanza sorts the sentences of a call by length, so large batches have little padding.
_COMMON: dict[str, Any] = {
    "processors": "tokenize,pos",
    "tokenize_pretokenized": True,
    "use_gpu": True,  # where there is one
    "logging_level": "CRITICAL",  # errors are reported once, by DiffcapError
    "pos_batch_size": 1000,
    "pos_batch_maximum_tokens": 10000,
}


@cache  # the pipeline must be loaded to find the files, which takes seconds
def _english() -> TaggerModel:
    import stanza

    options = {"lang": "en"}
    try:
        pipeline = stanza.Pipeline(**_COMMON, **options, download_method=stanza.DownloadMethod.REUSE_RESOURCES)
        paths = [value for key, value in sorted(pipeline.config.items()) if re.fullmatch("pos_.*_path", key) and value]
        weights = [Path(path) for path in paths if Path(path).is_file()]
    except Exception as error:  # requests, httpx, huggingface_hub and Stanza raise different types
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise DiffcapError(
            f"Stanza's English tagger is not on this machine and cannot be downloaded ({type(error).__name__}); connect to "
            "the internet once, give the folder of a local tagger (resources.json and one .pt file) as TAGGER=FOLDER, or use "
            "TAGGER=blocks, the small tagger that ships with diffcap (OFFLINE=yes chooses it, too)."
        ) from None
    identity = hashlib.sha256("".join(file_hash(path) for path in weights).encode()).hexdigest()
    return TaggerModel("english", identity, options)
