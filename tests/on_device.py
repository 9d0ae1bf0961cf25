"""Tensors on the CPU that count, as if they were on a GPU, how often the host waits for one of their values."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from diffcap.utils.host_copy import HostCopy

TO_HOST = {"item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__index__", "__float__", "__array__"}
OF_UNKNOWN_SHAPE = {"nonzero", "masked_select", "argwhere", "unique"}
FROM_HOST = {"tensor", "as_tensor", "from_numpy"}


class OnDevice(Tensor):
    """A tensor that counts as being on a GPU; so does everything that is computed from it."""

    is_cpu = False


def on_device(tensor: Tensor) -> Tensor:
    return tensor.as_subclass(OnDevice)


def on_host(value: Any) -> Any:
    return value.as_subclass(Tensor) if isinstance(value, OnDevice) else value


class _Counter(TorchFunctionMode):
    def __init__(self, waits: list[str]) -> None:
        super().__init__()
        self.waits = waits

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.__name__, kwargs or {}
        is_device = bool(args) and isinstance(args[0], OnDevice)
        if (is_device and name in TO_HOST | OF_UNKNOWN_SHAPE) or name in FROM_HOST:
            self.waits.append(name)
        if is_device and name == "__getitem__":
            indices = args[1] if isinstance(args[1], tuple) else (args[1],)
            self.waits += ["mask" for index in indices if isinstance(index, Tensor) and index.dtype == torch.bool]
        if is_device and name in TO_HOST:
            return on_host(func(on_host(args[0]), *args[1:], **kwargs))
        return func(*args, **kwargs)


@contextmanager
def counted_waits() -> Iterator[list[str]]:
    """Collect the functions that wait, or copy from the host to the device, in the block; a `HostCopy` waits once."""
    waits: list[str] = []

    def wait(copy: HostCopy) -> list[Tensor]:
        waits.append("HostCopy")
        return tree_map(on_host, copy._copies)

    with mock.patch.object(HostCopy, "wait", wait), _Counter(waits):
        yield waits
