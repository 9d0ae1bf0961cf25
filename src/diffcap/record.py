"""The record of a stage's result: the options and the files that it was made from. It decides whether the stage runs again.

```
{"format": 1, "asked": "5f0c...", "id": "91ab...",
 "files": {"data/blocks/manifest.jsonl": [31750, 1764076445123, "3dee..."]}, "products": {"metrics.json": [512, ...]}}
```

`asked` is the hash of the composed settings and the options of the command line; it is compared without importing torch. `id` is the
hash of the resolved options and of the contents of the files. A file has its size, its modification time and the hash of its
content, which is computed again only if size or time has changed.
"""

import hashlib
import json
import os
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from diffcap.records import file_hash, write_json
from diffcap.run_folder import read_object, weights_id
from diffcap.utils.errors import DiffcapError
from diffcap.utils.files import expand_home

FORMAT = 1
_LARGE, _END = 1 << 30, 1 << 20  # bytes
# Configurations, tokenizer, chat template, weights.
_BASE_MODEL_FILES = (".json", ".jinja", ".safetensors", ".model", ".txt")

Entry = list[Any]  # size in bytes, modification time in ns, and hash of the content


def digest(*values: Any) -> str:
    """A hash of JSON values and paths."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:16]


def named_files(value: Any) -> Iterator[Path]:
    """The existing files that options name: in lists, in dictionaries, between commas, and the files of a base model's folder."""
    if isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from named_files(item)
    elif isinstance(value, str | Path):
        for part in filter(None, map(str.strip, {str(value), *str(value).split(",")})):
            path = Path(expand_home(part))
            with suppress(OSError):  # the text is longer than the name of a file may be
                if path.is_file():
                    yield path
                elif (path / "config.json").is_file():
                    yield from (file for file in path.iterdir() if file.suffix in _BASE_MODEL_FILES)


def describe(path: Path, known: Entry | None = None) -> Entry:
    """Size, time and hash of a file; the hash of `known`, an earlier result, is used again if size and time are the same.

    The hash of a checkpoint is that of its weights, because the file contains the training time. Of a file over 1 GiB, such as the
    weights of a language model, only both ends are hashed.
    """
    state = path.stat()
    stamp = [state.st_size, state.st_mtime_ns]
    if known and known[:2] == stamp:
        return known
    if path.suffix == ".ckpt" and zipfile.is_zipfile(path):
        if recorded := weights_id(path):
            return [*stamp, recorded]
        from diffcap.checkpoints.reading import read_checkpoint, weights_hash

        with suppress(DiffcapError):  # the stage that reads it says why
            return [*stamp, f"weights {weights_hash(read_checkpoint(path))}"]
    if state.st_size <= _LARGE:
        return [*stamp, file_hash(path)]
    with path.open("rb") as file:
        ends = file.read(_END)
        file.seek(-_END, os.SEEK_END)
        return [*stamp, hashlib.sha256(ends + file.read() + str(state.st_size).encode()).hexdigest()]


def describe_files(paths: Iterable[Path], old: Mapping[str, Any]) -> dict[str, Entry]:
    """`describe` of each file that exists, by path; `old` is an earlier record."""
    known = old.get("files", {})
    return {str(path): describe(path, known.get(str(path))) for path in sorted(set(paths)) if path.is_file()}


def result_id(options: Mapping[str, Any], files: Mapping[str, Entry]) -> str:
    """The hash of resolved options and of the contents of files; a file that was only moved has the same content."""
    values = {}
    for name, value in flat(options).items():
        paths = list(map(str, named_files(value))) or [str(value)]
        contents = sorted(files[path][2] for path in paths if path in files)
        values[name] = contents or value
    return digest(values, sorted(entry[2] for entry in files.values()))


def read(path: Path) -> dict[str, Any]:
    """A record; {} if it is missing, damaged, or of an earlier version of diffcap."""
    found = read_object(path)
    return found if found.get("format") == FORMAT else {}


def write(path: Path, record: Mapping[str, Any]) -> None:
    """Write a record, unless it is there already: make takes a newer one for a new result."""
    if read_object(path) != record:
        write_json(path, record)


def make(asked: str, id: str, files: Mapping[str, Entry], products: Iterable[Path]) -> dict[str, Any]:
    """The record of a result; of its products those that exist."""
    made = {path.name: describe(path) for path in products if path.is_file()}
    return {"format": FORMAT, "asked": asked, "id": id, "files": files, "products": made}


def changed_files(record: Mapping[str, Any]) -> list[str]:
    """The files that are missing or have another content than when the record was written."""
    return [name for name, known in record.get("files", {}).items() if _is_other(Path(name), known)]


def lost_products(path: Path, record: Mapping[str, Any], compare: bool = True) -> list[str]:
    """The products of a stage that are missing beside its record, and, if `compare`, those that have another content."""
    products = record.get("products", {}).items()
    return [name for name, known in products if _is_other(path.with_name(name), known, compare)]


def _is_other(path: Path, known: Entry, compare: bool = True) -> bool:
    return not path.is_file() or (compare and describe(path, known)[2] != known[2])


def flat(options: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested options as {"model.captioner.init_args.width": 64}."""
    found: dict[str, Any] = {}
    for key, value in options.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found
