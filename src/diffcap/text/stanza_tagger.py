"""Find and load a Stanza part-of-speech tagger: the package's own, a local folder, or Stanza's English download."""

import errno
import gc
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from diffcap.errors import DiffcapError
from diffcap.records import file_hash, read_json

SHIPPED = Path(__file__).parent / "blocks_tagger"
_FORM = "a tagger's folder holds resources.json and one .pt file, as `make tagger` writes it"


@dataclass(frozen=True)
class TaggerModel:
    """A tagger that is there and can be loaded.

    Attributes:
        name: as the user gave it: "english", "blocks" or a folder.
        identity: hash of the model's weights; tags of another identity are not this tagger's.
        options: arguments of `stanza.Pipeline` that load it without asking the network.
    """

    name: str
    identity: str
    options: dict[str, Any] = field(default_factory=dict)


def find_tagger(tagger: str) -> TaggerModel:
    """Locate a tagger; "english" is downloaded by Stanza when it is not on this machine yet.

    Args:
        tagger: "english" (Stanza's own package), "blocks" (the tiny one of this package, for captions of blocks), or a
            folder that holds `resources.json` and one `.pt` file.

    Raises:
        DiffcapError: the folder is not of that form, or the English package is not here and cannot be fetched.
    """
    if tagger == "english":
        return _english()
    folder = SHIPPED if tagger == "blocks" else Path(tagger)
    if not folder.is_dir():
        raise DiffcapError(
            f"{folder}: no such tagger; give english, blocks, or a folder that holds resources.json and one .pt file."
        )
    models = sorted(folder.glob("*.pt"))
    if len(models) != 1:
        raise DiffcapError(f"{folder}: {len(models)} .pt files, not one; {_FORM}.")
    resources = read_json(folder / "resources.json", "list of Stanza's resources", _FORM)
    if not isinstance(resources, dict) or not resources:
        raise DiffcapError(f"{folder / 'resources.json'}: names no language; {_FORM}.")
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
    """The `stanza.Pipeline` of a found tagger, on the CPU; a broken model file becomes one sentence."""
    import stanza

    try:
        return stanza.Pipeline(**_COMMON, **model.options, download_method=None)
    except Exception as error:  # a truncated or foreign file fails in many ways inside torch and Stanza
        raise DiffcapError(
            f"{model.options.get('pos_model_path', model.name)}: Stanza cannot load this tagger "
            f"({_first_line(error)}); fetch it again, or train one with `make tagger`."
        ) from None


def tag_batch(pipeline: Any, sentences: Sequence[str]) -> list[list[str]]:
    """UPOS tags of sentences whose words are joined with blanks; one list a sentence, one tag a word."""
    words = [sentence.split(" ") for sentence in sentences]
    with _collect_once():
        tags = [[word.upos or "X" for word in sentence.words] for sentence in pipeline(words).sentences]
    if list(map(len, tags)) != list(map(len, words)):
        raise RuntimeError("Stanza gave back other words than it was given")
    return tags


@contextmanager
def _collect_once() -> Iterator[None]:
    """Keep Python from looking for garbage in the middle: Stanza makes dozens of objects a word, and half the time goes there."""
    was_enabled = gc.isenabled()
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        gc.collect()  # the document's words and sentences point at each other
        gc.unfreeze()
        if was_enabled:
            gc.enable()


# Stanza sorts a call's sentences by length, so that big batches cost little padding.
_COMMON: dict[str, Any] = {
    "processors": "tokenize,pos",
    "tokenize_pretokenized": True,
    "use_gpu": False,  # a few seconds on a CPU, and the same tags on every machine
    "logging_level": "CRITICAL",  # what goes wrong is said once, by the error
    "pos_batch_size": 1000,
    "pos_batch_maximum_tokens": 10000,
}


@cache  # loading it to learn where its files are takes seconds
def _english() -> TaggerModel:
    import stanza

    options = {"lang": "en"}
    try:
        pipeline = stanza.Pipeline(**_COMMON, **options, download_method=stanza.DownloadMethod.REUSE_RESOURCES)
        weights = [Path(value) for key, value in sorted(pipeline.config.items()) if _is_weights(key, value)]
    except Exception as error:  # requests, httpx, huggingface_hub and Stanza each have their own
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise DiffcapError(
            f"Stanza's English tagger is not on this machine and could not be fetched ({type(error).__name__}); go "
            "online once, or name the folder of a local tagger (resources.json and one .pt file) with --tagger=FOLDER."
        ) from None
    identity = hashlib.sha256("".join(file_hash(path) for path in weights).encode()).hexdigest()
    return TaggerModel("english", identity, options)


def _is_weights(key: str, value: object) -> bool:
    return key.startswith("pos_") and key.endswith("_path") and isinstance(value, str) and Path(value).is_file()


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
