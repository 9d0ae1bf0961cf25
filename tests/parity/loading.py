"""Reading a parity fixture and filling its weights by rule; see README.md beside this file."""

import json
import zlib
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

FIXTURES = Path(__file__).parent / "fixtures"
assert_close = partial(torch.testing.assert_close, atol=1e-4, rtol=1e-4)


class Fixture(NamedTuple):
    path: Path
    method: str
    hyperparameters: dict[str, Any]
    shapes: dict[str, Any]
    arrays: dict[str, Tensor]

    def weights(self, group: str | None = None) -> dict[str, Tensor]:
        """Of one of several models, or of the one that the fixture is of."""
        shapes = self.shapes if group is None else self.shapes[group]
        return {name: fill(name, shape) for name, shape in shapes.items()}


def with_statistics(official: Fixture) -> dict[str, Tensor]:
    """The parameters of RSICCformer or Chg2Cap, with batch norm's statistics at their initial values."""
    state = official.weights()
    for name, value in official.weights().items():
        layer, _, last = name.rpartition(".")
        if last == "weight" and layer.rpartition(".")[0].endswith(".left") and value.ndim == 1:
            state |= {f"{layer}.running_mean": torch.zeros_like(value), f"{layer}.running_var": torch.ones_like(value)}
            state[f"{layer}.num_batches_tracked"] = torch.tensor(0)
    return state


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
    return Fixture(path, metadata["method"], metadata["hyperparameters"], metadata["parameters"], arrays)


def find(folder: Path, *methods: str, **conditions: Any) -> list[Path]:
    """Every fixture of some methods in a folder, whatever its name, whose hyperparameters meet the conditions."""
    found = []
    for path in sorted(folder.glob("*.json")):
        metadata = json.loads(path.read_text())
        matches = all(metadata["hyperparameters"].get(key) == value for key, value in conditions.items())
        if metadata.get("method") in methods and matches:
            found.append(path)
    return found
