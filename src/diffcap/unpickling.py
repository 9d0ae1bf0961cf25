"""Other people's pickles, read without running what stands in them.

A pickle is a program: it may call anything it can name. Here it may name plain containers, numpy arrays, torch tensors, and
whatever stand-ins the caller admits; any other name is refused before it is looked up, and said.
"""

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import numpy as np

from diffcap.errors import DiffcapError

Admit = Mapping[str, Any]  # "module.Name", or ".Name" for a class of whatever module, -> what stands in its place


def _encode(text: str, encoding: str) -> bytes:
    """What Python 2's way of writing bytes needs, and no other codec."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"bytes in {encoding!r}, not latin1")
    return text.encode("latin1")


def _numpy_names() -> dict[str, Any]:
    multiarray = getattr(np, "_core", None) or np.core
    reconstruct, scalar = multiarray.multiarray._reconstruct, multiarray.multiarray.scalar  # type: ignore[attr-defined]
    names: dict[str, Any] = {"numpy.ndarray": np.ndarray, "numpy.dtype": np.dtype, "_codecs.encode": _encode}
    for room in ("numpy.core.multiarray", "numpy._core.multiarray"):
        names |= {f"{room}._reconstruct": reconstruct, f"{room}.scalar": scalar}
    return names


def _torch_names() -> dict[str, Any]:
    import torch

    names: dict[str, Any] = {f"torch.{name}": getattr(torch, name) for name in ("Size", "float32", "float16", "int64")}
    rebuild = ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_parameter")
    names |= {f"torch._utils.{name}": getattr(torch._utils, name) for name in rebuild}
    kinds = ("Float", "Half", "Double", "Long", "Int", "Short", "Byte", "Char", "Bool")
    return names | {f"torch.{kind}Storage": getattr(torch, f"{kind}Storage") for kind in kinds}


PLAIN: dict[str, Any] = {"collections.OrderedDict": OrderedDict}


def _unpickler(names: Admit) -> type[pickle.Unpickler]:
    class Restricted(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            for key in (f"{module}.{name}", f".{name}"):
                if key in names:
                    return names[key]
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is not admitted")

    return Restricted


def load_arrays(path: str | Path, admit: Admit | None = None) -> Any:
    """A pickle of plain containers and numpy arrays (Python 2's, too).

    Raises:
        DiffcapError: missing, damaged, or it names anything else; nothing of it was run.
    """
    names = {**PLAIN, **_numpy_names(), **(admit or {})}
    return _guarded(path, lambda file: _unpickler(names)(file, encoding="latin1").load())


def load_tensors(path: str | Path, admit: Admit | None = None) -> Any:
    """What `torch.save` wrote, in its old form or its new one: plain containers and tensors, on the CPU.

    Raises:
        DiffcapError: missing, damaged, or it names anything else; nothing of it was run.
    """
    import torch

    unpickler = _unpickler({**PLAIN, **_numpy_names(), **_torch_names(), **(admit or {})})

    def load(file: IO[bytes], **options: Any) -> Any:
        return unpickler(file, **options).load()

    module = SimpleNamespace(
        Unpickler=unpickler,
        load=load,
        loads=lambda data, **options: load(io.BytesIO(data), **options),
        __name__="pickle",
    )
    return _guarded(path, lambda file: torch.load(file, map_location="cpu", pickle_module=module, weights_only=False))


def _guarded(path: str | Path, read: Callable[[IO[bytes]], Any]) -> Any:
    path = Path(path)
    if not path.is_file():
        raise DiffcapError(f"{path}: no such file; check the path.")
    try:
        with path.open("rb") as file:
            return read(file)
    except Exception as error:  # a damaged pickle may fail in any way at all
        reason = " ".join(str(error).split())[:200].rstrip(". ") or type(error).__name__
        raise DiffcapError(
            f"{path}: refused, nothing of it was run: {reason}; fetch the file again, from its authors."
        ) from None
