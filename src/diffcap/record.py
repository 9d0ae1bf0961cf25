"""The record of a stage's result: the options and the files that the result was made from. If they change, the stage runs again.

```
{"format": 1, "asked": "5f0c...", "id": "91ab...",
 "files": {"data/blocks/manifest.jsonl": [31750, 1764076445123, "3dee..."]}, "products": {"metrics.json": [512, ...]}}
```

`asked` is the hash of the settings and the options of the command line. It is compared first, because it is computed without torch. `id`
is the hash of all options, also those with default values, and of the contents of `files`. `products` are the files of the result. Each
file has its size in bytes, its modification time in ns, and the hash of its content, which is computed again only if one of them changed.
"""

import hashlib
import json
import os
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from diffcap.records import JsonDict, file_hash, write_json
from diffcap.run_folder import read_object, recorded_weights
from diffcap.utils.errors import DiffcapError
from diffcap.utils.files import expand_home

FORMAT = 1
_LARGE_FILE, _END_PART = 1 << 30, 1 << 20  # bytes; of a larger file, only the first and last `_END_PART` are hashed
_BASE_MODEL_FILES = (".json", ".jinja", ".safetensors", ".model", ".txt")

Entry = list[Any]  # describes a file: size in bytes, modification time in ns, and hash of the content


def digest(*values: Any) -> str:
    """Return a hash of JSON values and paths."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:16]


def named_files(value: Any) -> Iterator[Path]:
    """Yield the existing files that options name, also in lists, dictionaries and comma-separated texts, and the files of base models."""
    if isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from named_files(item)
    elif isinstance(value, str | Path):
        for part in filter(None, map(str.strip, {str(value), *str(value).split(",")})):
            path = Path(expand_home(part))
            with suppress(OSError):  # the text is longer than the name of a file may be
                if path.is_file():
                    yield path
                elif (path / "config.json").is_file():  # a base model (pre-trained, such as SmolVLM)
                    yield from (file for file in path.iterdir() if file.suffix in _BASE_MODEL_FILES)


def describe(path: Path, old_entry: Entry | None = None) -> Entry:
    """Return the entry of a file. If the file's size and time are those in `old_entry`, `old_entry` is returned.

    Of a checkpoint, only the weights are hashed, because the file also contains the time that the training took. Of a file of more than
    1 GiB, such as the weights of a language model, only the first and the last MiB are hashed.
    """
    state = path.stat()
    size_and_time = [state.st_size, state.st_mtime_ns]
    if old_entry and old_entry[:2] == size_and_time:
        return old_entry
    if path.suffix == ".ckpt" and zipfile.is_zipfile(path):
        if recorded_hash := recorded_weights(path):
            return [*size_and_time, recorded_hash]
        from diffcap.checkpoints.reading import read_checkpoint, weights_hash

        with suppress(DiffcapError):  # a damaged file; the stage that reads it reports the error
            return [*size_and_time, f"weights {weights_hash(read_checkpoint(path))}"]
    if state.st_size <= _LARGE_FILE:
        return [*size_and_time, file_hash(path)]
    with path.open("rb") as file:
        ends = file.read(_END_PART)
        file.seek(-_END_PART, os.SEEK_END)
        return [*size_and_time, hashlib.sha256(ends + file.read() + str(state.st_size).encode()).hexdigest()]


def describe_files(paths: Iterable[Path], old_record: Mapping[str, Any]) -> dict[str, Entry]:
    """Return the entry of each file that exists, by path. Entries in `old_record` of unchanged files are used again."""
    old_entries = old_record.get("files", {})
    return {str(path): describe(path, old_entries.get(str(path))) for path in sorted(set(paths)) if path.is_file()}


def result_id(options: Mapping[str, Any], files: Mapping[str, Entry]) -> str:
    """Return the hash of options and of the contents of files. Paths of files are not hashed, so moving a file keeps the hash."""
    hashes_or_values = {}  # option -> hashes of its files; for an option without files, its value
    for name, value in flat(options).items():
        paths = list(map(str, named_files(value))) or [str(value)]
        hashes = sorted(files[path][2] for path in paths if path in files)
        hashes_or_values[name] = hashes or value
    return digest(hashes_or_values, sorted(entry[2] for entry in files.values()))


def read(path: Path) -> JsonDict:
    """Read a record; return {} if it is missing, damaged, or of an earlier version of diffcap."""
    record = read_object(path)
    return record if record.get("format") == FORMAT else {}


def write(path: Path, record: Mapping[str, Any]) -> None:
    """Write a record, unless the file has this content already, because make takes a file with a newer time for a new result."""
    if read_object(path) != record:
        write_json(path, record)


def make(asked: str, id: str, files: Mapping[str, Entry], products: Iterable[Path]) -> JsonDict:
    """Return the record of a result. The module's docstring explains `asked` and `id`. Products that do not exist are left out."""
    product_entries = {path.name: describe(path) for path in products if path.is_file()}
    return {"format": FORMAT, "asked": asked, "id": id, "files": files, "products": product_entries}


def changed_files(record: Mapping[str, Any]) -> list[str]:
    """Return the files that are missing or have changed since the record was written."""
    return [name for name, entry in record.get("files", {}).items() if _has_changed(Path(name), entry)]


def lost_products(path: Path, record: Mapping[str, Any], compare: bool = True) -> list[str]:
    """Return the products (result files beside the record in `path`) that are missing and, if `compare` is true, the changed ones."""
    entries = record.get("products", {}).items()
    return [name for name, entry in entries if _has_changed(path.with_name(name), entry, compare)]


def _has_changed(path: Path, old_entry: Entry, compare: bool = True) -> bool:
    return not path.is_file() or (compare and describe(path, old_entry)[2] != old_entry[2])


def flat(options: Mapping[str, Any], prefix: str = "") -> JsonDict:
    """Flatten nested options: {"model": {"lr": 0.1}} becomes {"model.lr": 0.1}."""
    flat_options: JsonDict = {}
    for key, value in options.items():
        if isinstance(value, Mapping) and value:
            flat_options |= flat(value, f"{prefix}{key}.")
        else:
            flat_options[f"{prefix}{key}"] = value
    return flat_options
