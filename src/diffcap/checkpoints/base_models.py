"""Find the base model of METHOD=vlm, an open vision-language model, as a local folder: fetch it from the Hugging Face Hub, check it.

Only configurations, tokenizers and weights in safetensors format are fetched. Code in the repository is neither fetched nor run,
and formats that can contain code (*.bin) are not read.
"""

import hashlib
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffcap.checkpoints.hub_access import check_name, hub_errors, is_name
from diffcap.checkpoints.reading import CONFIG, WEIGHTS
from diffcap.records import read_json
from diffcap.utils.console import echo
from diffcap.utils.errors import DiffcapError, printable, wrap_errors

# model_type of config.json; the classes of transformers for these types have passed the tests of METHOD=vlm.
SUPPORTED = ("qwen2_5_vl", "qwen3_vl", "smolvlm", "idefics3", "internvl", "llava_onevision", "gemma3")

INDEX = f"{WEIGHTS}.index.json"  # of weights in several files ("shards")
ZERO_SHOT = "zero-shot"  # stage of a base model without training
README = "README.md"
ADAPTER = "adapter_config.json"  # of PEFT; transformers applies the adapter of a folder that has one
# Files beside the weights that transformers reads (configurations, tokenizer, chat template), and the licence.
_SMALL_FILES = ["*.json", "*.txt", "*.jinja", "*.model", README, "LICENSE*"]
_MIB = 1 << 20


@dataclass(frozen=True)
class BaseModel:
    """A base model whose files are on this machine."""

    name: str  # repository as user/name, or the absolute path of the folder
    folder: Path
    revision: str | None  # commit of the repository, 40 hexadecimal digits; None for a local folder
    licence: str | None  # the Hub's identifier or the title; None if the repository does not say it


def origin(name: str, revision: str | None, licence: str | None) -> str:
    """Name, commit and licence of a base model, for messages."""
    return f"{name}{f' at commit {revision}' if revision else ''}, licence: {licence or 'not stated'}"


def names_base_model(source: str | Path) -> bool:
    """Whether this is a folder of a base model of any type, or the name of one on the Hub, instead of a captioner of diffcap.

    Of a repository on the Hub, only config.json is fetched.
    """
    path = Path(source).expanduser()
    if path.exists():
        try:
            config = read_json(path / CONFIG)
        except (DiffcapError, OSError):
            return False
        return isinstance(config, dict) and "model_type" in config and "format" not in config
    name, _, revision = str(source).partition("@")
    if not isinstance(source, str) or path.suffix == ".ckpt" or not is_name(name):
        return False
    config = read_json(_fetch_config(name, revision or None), "configuration", "check the name")
    if isinstance(config, dict) and "format" in config:
        return False
    _check_type(name, config)
    return True


def find_base(base: str, revision: str | None = None) -> BaseModel:
    """Find a base model, and fetch it unless it is in the Hub's cache already.

    Its config.json is fetched and checked before any other file. Weights are fetched one file after the other, so a killed process
    keeps the complete files. With a complete cache, nothing is requested for a commit, and one request finds the current commit of
    a branch; without network, the one that was current at the last request is used. A local folder ignores `revision`.
    """
    folder = Path(base).expanduser()
    commit = None
    if folder.is_dir():
        folder = folder.resolve()
        base = str(folder)
    else:
        base, _, own = base.partition("@")
        revision = revision or own or None
        if not is_name(base):
            raise DiffcapError(
                f"{base}: neither a local folder nor the name of a repository on the Hub; give an existing folder or user/name."
            )
        folder = _fetch_config(base, revision).parent
        commit = folder.name
    config = read_json(folder / CONFIG, "configuration of a base model", "give a folder with all files of the model")
    _check_type(base, config)
    if commit is not None:
        _fetch_files(base, commit, folder)
    if (folder / ADAPTER).is_file():
        raise DiffcapError(
            f"{base}: has an adapter ({ADAPTER}), which would change the model without notice; give the base model alone, or merge the "
            "adapter into it."
        )
    _check_weights(base, folder)
    return BaseModel(base, folder, commit, _licence(folder))


def base_licence(base: str, revision: str | None) -> str | None:
    """The licence of a base model, see `BaseModel`; only the files that say it are fetched. None if they cannot be read."""
    folder = Path(base).expanduser()
    if folder.is_dir():
        return _licence(folder)
    if not is_name(base):
        return None
    with suppress(DiffcapError):  # no network, or no access
        readme = _fetch(base, README, revision)
        licence = _licence(readme.parent) if readme else None
        if licence in (None, "other") and (text := _fetch(base, "LICENSE", revision)):
            licence = _licence(text.parent)
        return licence
    return None


def base_sha256(folder: Path) -> str:
    """SHA-256 in hexadecimal that identifies a base model, the same for a local folder and a download.

    It covers config.json and, for each file of the weights in the order of their names, the name, the size, and the first and
    the last MiB, because a hash of gigabytes would take minutes at each start.
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
    check_name(name)
    path = _fetch(name, CONFIG, revision)
    if path is None:
        raise DiffcapError(
            f"{name}: neither a captioner of diffcap nor a base model, {CONFIG} is missing; check the name on the Hub."
        )
    return path


def _fetch(name: str, file: str, revision: str | None) -> Path | None:
    """Fetch one file; None if the repository does not have it."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    with hub_errors(name):
        try:
            return Path(hf_hub_download(name, file, revision=revision))
        except LocalEntryNotFoundError:  # not in the cache, and the Hub does not answer
            raise
        except EntryNotFoundError:
            return None


def _fetch_files(name: str, commit: str, folder: Path) -> None:
    from huggingface_hub import snapshot_download

    with hub_errors(name):
        snapshot_download(name, revision=commit, allow_patterns=_SMALL_FILES, ignore_patterns=["*/*", "adapter_*"])
    weights = _weight_files(folder)
    if not all((folder / file).is_file() for file in weights):  # before anything large, with the terms of its use
        echo(f"downloading {origin(name, commit, _licence(folder))}", err=True)
    for file in weights:
        _fetch(name, file, commit)  # `_check_weights` reports missing ones


def _check_type(base: str, config: Any) -> None:
    """Check the type of a base model, which must be in `SUPPORTED`.

    A configuration of such a type may name code of the repository in "auto_map"; transformers then uses its own class.
    """
    if not isinstance(config, dict) or "format" in config or "model_type" not in config:
        raise DiffcapError(f"{base}: not a base model, its {CONFIG} has no model_type; check the name or the folder.")
    kind = config["model_type"]
    if kind not in SUPPORTED:
        code = " and needs code of its repository, which diffcap does not run" if "auto_map" in config else ""
        raise DiffcapError(
            f"{base}: a model of type {kind!r:.40}, which is not supported{code}; choose one of the types {', '.join(SUPPORTED)}."
        )


def _weight_files(folder: Path) -> list[str]:
    """Names of the files of weights that transformers reads, sorted; not all of them need exist."""
    if (folder / WEIGHTS).is_file() or not (folder / INDEX).is_file():
        return [WEIGHTS]
    index = read_json(folder / INDEX)
    shards = index.get("weight_map") if isinstance(index, dict) else None
    names = list(shards.values()) if isinstance(shards, dict) else []
    if not names or not all(re.fullmatch(r"[^/\\]+\.safetensors", str(name)) for name in names):
        raise DiffcapError(
            f'{folder / INDEX}: "weight_map" does not give a file *.safetensors for each weight; download it again.'
        )
    return sorted(set(names))


def _check_weights(base: str, folder: Path) -> None:
    """Check that all files of weights exist and are complete; their values are not read."""
    from safetensors import safe_open

    for name in _weight_files(folder):
        path = folder / name
        if not path.is_file() and (folder / INDEX).is_file():
            raise DiffcapError(f"{base}: {name}, which {INDEX} names, is missing; download it again.")
        if not path.is_file():
            other = next(folder.glob("*.bin"), None)
            found = f" ({other.name} is not read, because it can contain code)" if other else ""
            raise DiffcapError(
                f"{base}: no weights in safetensors format there, {WEIGHTS} or {INDEX}{found}; choose a model that has them, or "
                "convert it with save_pretrained of transformers."
            )
        with wrap_errors(path, "not a complete safetensors file", "download it again"), safe_open(path, "numpy"):
            pass


def _licence(folder: Path) -> str | None:
    """The licence in the metadata of README.md, else the first line of a LICENSE file; one line without control characters."""
    from huggingface_hub import metadata_load

    metadata: dict[str, Any] = {}
    with suppress(Exception):  # no README.md, or metadata that are not YAML
        metadata = metadata_load(folder / README) or {}
    licence = metadata.get("license")
    if licence in (None, "other"):  # the Hub has no identifier of this licence
        files = sorted(folder.glob("LICENSE*"))
        lines = [line.strip("# \t\ufeff") for file in files for line in file.read_text(errors="replace").splitlines()]
        licence = metadata.get("license_name") or next(filter(None, lines), licence)
    if isinstance(licence, list):
        licence = ", ".join(map(str, licence))
    return printable(licence)[:100] if licence else None


def base_record(checkpoint: Any) -> dict[str, object]:
    """The entry of a vision-language model without training in metrics.json, instead of a checkpoint's."""
    entries = {name: checkpoint.metadata[name] for name in ("base", "revision", "licence", "stage", "step")}
    return {**entries, "weights_sha256": checkpoint.captioner.hyperparameters["base_sha256"]}
