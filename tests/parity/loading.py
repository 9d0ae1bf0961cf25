"""Reading a parity fixture and filling its weights by rule; see README.md beside this file."""

import json
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

FIXTURES = Path(__file__).parent / "fixtures"


class Fixture(NamedTuple):
    path: Path
    hyperparameters: dict[str, Any]
    shapes: dict[str, Any]
    arrays: dict[str, Tensor]

    def weights(self, group: str | None = None) -> dict[str, Tensor]:
        """Of one of several models, or of the one that the fixture is of."""
        shapes = self.shapes if group is None else self.shapes[group]
        return {name: fill(name, shape) for name, shape in shapes.items()}


def fill(name: str, shape: list[int]) -> Tensor:
    if not shape:  # a logit scale, left at its initial value
        return torch.ones(())
    values = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
    if len(shape) >= 2:
        values = values / np.sqrt(np.prod(shape[1:]))
    else:
        values = 0.05 * values + (1.0 if name.endswith(("weight", "a_2")) else 0.0)
    return torch.from_numpy(values.astype(np.float32))


def load(path: Path) -> Fixture:
    metadata = json.loads(path.read_text())
    arrays = {name: torch.from_numpy(array) for name, array in np.load(path.with_suffix(".npz")).items()}
    return Fixture(path, metadata["hyperparameters"], metadata["parameters"], arrays)


def find(folder: Path, method: str, **conditions: Any) -> list[Path]:
    """Every fixture of a method in a folder, whatever its name, whose hyperparameters meet the conditions."""
    found = []
    for path in sorted(folder.glob("*.json")):
        metadata = json.loads(path.read_text())
        matches = all(metadata["hyperparameters"].get(key) == value for key, value in conditions.items())
        if metadata.get("method") == method and matches:
            found.append(path)
    return found


def view_sizes(official: Fixture) -> dict[str, Any]:
    """The arguments of SCORER and DIRL that a fixture of either names."""
    names = [
        "feature_channels",
        "grid",
        "max_length",
        "width",
        "heads",
        "encoder_layers",
        "decoder_layers",
        "word_width",
        "coordinates",
    ]
    metadata = official.hyperparameters
    return {"vocabulary_size": metadata["vocabulary"], **{name: metadata[name] for name in names}}
