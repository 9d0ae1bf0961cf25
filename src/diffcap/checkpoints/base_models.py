"""Find a base model, which is an open vision-language model, in a local folder or on the Hugging Face Hub, and check it.

Only configurations, tokenizers and weights in safetensors format are fetched. Code in the repository is never fetched or run.
Formats that can contain code (*.bin) are not read.
"""

import hashlib
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffcap.checkpoints.hub_access import check_repository_name, hub_errors, is_repository_name
from diffcap.checkpoints.reading import CONFIG, WEIGHTS
from diffcap.records import read_json
from diffcap.run_folder import read_object
from diffcap.text.hub import import_transformers
from diffcap.utils.console import echo
from diffcap.utils.errors import DiffcapError, printable, wrap_errors
from diffcap.utils.files import served_name

# Values of model_type in config.json. The classes of transformers for these types have passed the tests of diffcap.
MODEL_TYPES = ("qwen2_5_vl", "qwen3_vl", "smolvlm", "idefics3", "internvl", "llava_onevision", "gemma3")

INDEX_FILE = f"{WEIGHTS}.index.json"  # exists if the weights are split into several files ("shards"), and lists them
ZERO_SHOT = "zero-shot"  # value of the entry "stage" for a base model that diffcap has not trained
README_FILE = "README.md"
ADAPTER = "adapter_config.json"  # file of PEFT; if it exists, transformers applies the adapter that it describes
# The files that transformers reads besides the weights (configurations, tokenizer, chat template), README.md and the licence.
_SMALL_FILES = ["*.json", "*.txt", "*.jinja", "*.model", README_FILE, "LICENSE*"]
_MIB = 2**20


@dataclass(frozen=True)
class BaseModel:
    """A base model whose files are on this machine."""

    name: str  # repository as user/name, or the absolute path of the folder
    folder: Path
    revision: str | None  # commit of the repository, 40 hexadecimal digits; None for a local folder
    licence: str | None  # the Hub's identifier of the licence, or its title; None if the repository states no licence
    model_type: str  # the family, as in config.json


def text_only_error(name: str) -> DiffcapError:
    """Return the error for a model that only answers with text, where more is needed."""
    return DiffcapError(
        f"{name}: only answers with text, so it has no probabilities, beam search, ensembles, heat maps or training; models of the types "
        f"{', '.join(MODEL_TYPES)} have them."
    )


def describe_origin(name: str, revision: str | None, licence: str | None) -> str:
    """Return the name, commit and licence of a base model as a text for messages."""
    commit = f" at commit {revision}" if revision else ""
    return f"{name}{commit}, licence: {licence or 'not stated'}"


def names_base_model(source: str | Path) -> bool:
    """Return True if a source, which is a folder, a name on the Hub or a served model, is a base model and not a captioner of diffcap.

    For a name on the Hub, only config.json is fetched. If this file has the key "format", diffcap wrote it for a captioner.
    """
    if served_name(source):
        return True
    path = Path(source).expanduser()
    if path.exists():
        config = read_object(path / CONFIG) if path.is_dir() else {}
        return "model_type" in config and "format" not in config
    name, _, revision = str(source).partition("@")
    if not isinstance(source, str) or path.suffix == ".ckpt" or not is_repository_name(name):
        return False
    config = read_json(_fetch_config(name, revision or None), "configuration", "check the name")
    return not (isinstance(config, dict) and "format" in config)


def find_base(base: str, revision: str | None = None, any_type: bool = False) -> BaseModel:
    """Find a base model; fetch the files that are not in the Hub's cache yet.

    Its type must be in `MODEL_TYPES`, or with `any_type` one of transformers that answers with text about images and text.
    `revision` (branch, tag or commit) is ignored for a local folder. config.json is checked first. Complete files of an interrupted
    download are not fetched again.
    If all files are cached and `revision` is a commit, the Hub is not contacted; for a branch, one request asks for its commit. Without a
    network, the last commit of the branch that is in the cache is used.
    """
    if name := served_name(base):
        raise text_only_error(name)
    folder = Path(base).expanduser()
    commit = None
    if folder.is_dir():
        folder = folder.resolve()
        base = str(folder)
    else:
        base, _, revision_in_name = base.partition("@")
        revision = revision or revision_in_name or None
        if not is_repository_name(base):
            raise DiffcapError(
                f"{base}: neither a local folder nor the name of a repository on the Hub; give an existing folder or user/name."
            )
        folder = _fetch_config(base, revision).parent
        commit = folder.name
    config = read_json(folder / CONFIG, "configuration of a base model", "give a folder with all files of the model")
    if not isinstance(config, dict) or "format" in config or "model_type" not in config:
        raise DiffcapError(f"{base}: not a base model, its {CONFIG} has no model_type; check the name or the folder.")
    model_type = config["model_type"]
    auto = import_transformers().models.auto.modeling_auto if any_type else None
    if model_type not in (auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES if auto else MODEL_TYPES):
        # For a supported type, the class in transformers is used, even if the configuration names code of the repository ("auto_map").
        code = " and needs code of its repository, which diffcap does not run" if "auto_map" in config else ""
        raise DiffcapError(
            f"{base}: a model of type {model_type!r:.40}, which is not supported{code}; choose one of the types {', '.join(MODEL_TYPES)}."
        )
    if commit is not None:
        from huggingface_hub import snapshot_download

        with hub_errors(base):  # subfolders and adapters are not fetched
            snapshot_download(base, revision=commit, allow_patterns=_SMALL_FILES, ignore_patterns=["*/*", "adapter_*"])
        weights = _weight_files(folder)
        if not all((folder / file).is_file() for file in weights):  # the user sees the licence before the download
            echo(f"downloading {describe_origin(base, commit, _licence(folder))}", err=True)
        for file in weights:
            _fetch_file(base, file, commit)  # `_check_weights` reports files that the repository lacks
    if (folder / ADAPTER).is_file():
        raise DiffcapError(
            f"{base}: has an adapter ({ADAPTER}), which would change the model without notice; give the base model alone, or merge the "
            "adapter into it."
        )
    _check_weights(base, folder)
    return BaseModel(base, folder, commit, _licence(folder), model_type)


def base_licence(base: str, revision: str | None) -> str | None:
    """Return `BaseModel.licence` without fetching the weights: only README.md and LICENSE are read. None if this fails."""
    folder = Path(base).expanduser()
    if is_repository_name(base) and not folder.is_dir():
        with suppress(DiffcapError):  # no network, or no access
            for name in (README_FILE, "LICENSE"):
                file = _fetch_file(base, name, revision)
                folder = file.parent if file else folder
    return _licence(folder)


def base_sha256(folder: Path) -> str:
    """Return the SHA-256 (hexadecimal) that identifies a base model. A local folder and a download of the same model have the same hash.

    The hash is computed from config.json, and from the name, size, first MiB and last MiB of each file of weights, because hashing all
    bytes would take minutes.
    """
    digest = hashlib.sha256()
    try:
        digest.update(hashlib.sha256((folder / CONFIG).read_bytes()).digest())
        for name in _weight_files(folder):
            path = folder / name
            size = path.stat().st_size
            digest.update(f"{name}\n{size}\n".encode())
            with path.open("rb") as file:
                digest.update(file.read(_MIB))
                file.seek(max(0, size - _MIB))
                digest.update(file.read())
    except FileNotFoundError as error:
        raise DiffcapError(f"{error.filename}: no such file; give a folder with all files of the base model.") from None
    return digest.hexdigest()


def _fetch_config(name: str, revision: str | None) -> Path:
    """Fetch config.json to `snapshots/<commit>/config.json` in the Hub's cache."""
    check_repository_name(name)
    path = _fetch_file(name, CONFIG, revision)
    if path is None:
        raise DiffcapError(
            f"{name}: neither a captioner of diffcap nor a base model, {CONFIG} is missing; check the name on the Hub."
        )
    return path


def _fetch_file(name: str, file: str, revision: str | None) -> Path | None:
    """Fetch one file to the Hub's cache and return its path there; return None if the repository does not have the file."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    with hub_errors(name):
        try:
            return Path(hf_hub_download(name, file, revision=revision))
        except LocalEntryNotFoundError:  # not in the cache, and the Hub does not answer
            raise
        except EntryNotFoundError:
            return None


def _weight_files(folder: Path) -> list[str]:
    """Return the sorted names of the files of weights that transformers reads. Some of these files may be missing."""
    if (folder / WEIGHTS).is_file() or not (folder / INDEX_FILE).is_file():
        return [WEIGHTS]
    index = read_json(folder / INDEX_FILE)
    shards = index.get("weight_map") if isinstance(index, dict) else None
    names = list(shards.values()) if isinstance(shards, dict) else []
    if not names or not all(re.fullmatch(r"[^/\\]+\.safetensors", str(name)) for name in names):
        raise DiffcapError(
            f'{folder / INDEX_FILE}: "weight_map" does not give a file *.safetensors for each weight; download it again.'
        )
    return sorted(set(names))


def _check_weights(base: str, folder: Path) -> None:
    """Check that all files of weights exist and are complete, without reading the values."""
    from safetensors import safe_open

    for name in _weight_files(folder):
        path = folder / name
        if not path.is_file() and (folder / INDEX_FILE).is_file():
            raise DiffcapError(f"{base}: {name}, which {INDEX_FILE} names, is missing; download it again.")
        if not path.is_file():
            pickle_file = next(folder.glob("*.bin"), None)
            note = f" ({pickle_file.name} is not read, because it can contain code)" if pickle_file else ""
            raise DiffcapError(
                f"{base}: no weights in safetensors format there, {WEIGHTS} or {INDEX_FILE}{note}; choose a model that has them, or "
                "convert it with save_pretrained of transformers."
            )
        with wrap_errors(path, "not a complete safetensors file", "download it again"), safe_open(path, "numpy"):
            pass


def _licence(folder: Path) -> str | None:
    """Return the licence in the metadata of README.md, or else the first line of a LICENSE file, without control characters."""
    from huggingface_hub import metadata_load

    metadata: dict[str, Any] = {}
    with suppress(Exception):  # no README.md, or metadata that are not YAML
        metadata = metadata_load(folder / README_FILE) or {}
    licence = metadata.get("license")
    if licence in (None, "other"):  # the Hub has no identifier of this licence
        files = sorted(folder.glob("LICENSE*"))
        lines = [line.strip("# \t\ufeff") for file in files for line in file.read_text(errors="replace").splitlines()]
        licence = metadata.get("license_name") or next(filter(None, lines), licence)
    if isinstance(licence, list):
        licence = ", ".join(map(str, licence))
    return printable(licence)[:100] if licence else None


def base_record(loaded: Any) -> dict[str, object]:
    """Return the entry of metrics.json for a base model that diffcap has not trained. `loaded` is what `loading.load` returned."""
    entries = {name: loaded.metadata[name] for name in ("base", "revision", "licence", "stage", "step")}
    return {**entries, "weights_sha256": loaded.captioner.hyperparameters["base_sha256"]}
