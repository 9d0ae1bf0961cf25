"""Read values from settings files (YAML) without Lightning's command line."""

import itertools
import re
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from diffcap.utils.errors import DiffcapError, one_line

Settings = dict[str, Any]
_HERE = Path(__file__).parents[1]
# The folder of the settings files: configs in a checkout, or its copy in an installed wheel (in a checkout, src/diffcap/configs is a link).
CONFIGS = _HERE.parents[1] / "configs"
if not (CONFIGS / "trainer/default.yaml").is_file():
    CONFIGS = _HERE / "configs"


class _UniqueKeyLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """PyYAML's fast safe loader, but repeated keys are an error, and 1e-4 is a number, as jsonargparse reads it."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        if repeated := [key for key in keys if keys.count(key) > 1 and key != "<<"]:
            raise yaml.YAMLError(f"the key {repeated[0]!r} is repeated in line {node.start_mark.line + 1} ff.")
        return super().construct_mapping(node, deep)  # type: ignore[no-any-return]


_UniqueKeyLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def read_settings(path: str | Path) -> Any:
    """Read a YAML file."""
    path = Path(path)
    try:
        return yaml.load(path.read_text(encoding="utf-8"), _UniqueKeyLoader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise DiffcapError(f"{path}: not YAML ({one_line(error, 120)}); fix the file.") from None


def get_config_value(files: Iterable[Path | Settings], *keys: str) -> Any:
    """Return the value of nested keys in the last file (or content of a file) that has them; None if no file has them."""
    found = None
    for file in files:
        value = file if isinstance(file, dict) else read_settings(file) if file.is_file() else None
        for key in keys[:-1]:
            value = value.get(key) if isinstance(value, dict) else None
        if isinstance(value, dict):
            found = value.get(keys[-1], found)
    return found


@cache
def backbones() -> dict[str, Settings]:
    """Return the options of each backbone by its name, the value of BACKBONE."""
    content: dict[str, Settings] = read_settings(CONFIGS / "backbones.yaml")
    return content


def own_configs(words: Sequence[str]) -> list[str]:
    """Return the values of `--config` in a command line."""
    separate = [value for word, value in itertools.pairwise(words) if word == "--config"]
    return separate + [word.partition("=")[2] for word in words if word.startswith("--config=")]
