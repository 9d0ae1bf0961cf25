"""Read untrusted pickles without running their code.

A pickle is a program that may call anything it can import. Tensors are read by torch's restricted reader. Numpy arrays are read
by replacement classes that accept numbers and text only, because numpy's own classes can be made to read any memory. A pickle
that uses any other name is refused before the name is imported.
"""

import pickle
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from diffcap.utils.errors import DiffcapError

_DTYPE_PATTERN = re.compile(r"[<>|=]?([biufc]\d{1,2}|[SU]\d{1,6})")
# torch's message: the name that it refuses, and the beginning of its advice to read the file unsafely.
_REFUSED_NAME = re.compile(r"GLOBAL (\S{1,120}) (?:was not an allowed global|whose module \S+ is blocked)")
_ADVICE = re.compile(r" ?(?:Check the documentation of|Re-running|Please file an issue|In PyTorch 2\.6,)")


def load_arrays(path: str | Path) -> Any:
    """Read a pickle of plain containers, numbers, text, and numpy arrays of numbers or text. Python 2 may have written it."""
    return _load(path, lambda file: _unwrap(_ArrayUnpickler(file, encoding="latin1").load()))


def state_of_module(module: Any) -> dict[str, Any] | None:
    """Return the parameters and buffers, by name, of a torch module that `load_tensors` read as an OrderedDict; None for other objects."""
    attributes = getattr(module, "__dict__", {})
    if not isinstance(attributes.get("_modules"), dict):
        return None
    state: dict[str, Any] = {}
    for kind in ("_parameters", "_buffers"):
        state |= {name: value for name, value in attributes.get(kind, {}).items() if value is not None}
    for name, child in attributes["_modules"].items():
        state |= {f"{name}.{child_name}": value for child_name, value in (state_of_module(child) or {}).items()}
    return state


def load_tensors(path: str | Path, allowed_classes: Sequence[str] = ()) -> Any:
    """Read plain containers and tensors that `torch.save` wrote, in the zip or the legacy format, to the CPU.

    Classes whose names are in `allowed_classes`, in any module, are replaced by OrderedDict, which keeps their attributes.
    """
    import torch

    def load(file: IO[bytes]) -> Any:
        try:  # list the names "module.Name" that the file uses, without importing them
            names = set(torch.serialization.get_unsafe_globals_in_checkpoint(file))
        except ValueError:  # torch cannot list a legacy file: search its bytes for such names
            file.seek(0)
            matches = re.findall(rb"c([\w.]+)\n([A-Za-z_]\w*)\n", file.read())
            names = {f"{module.decode()}.{name.decode()}" for module, name in matches}
        finally:
            file.seek(0)
        substitutes: list[Any] = [
            # defaultdict is called with a class, which OrderedDict does not accept
            ((lambda *_: OrderedDict()) if name == "collections.defaultdict" else OrderedDict, name)
            for name in names
            if name.rsplit(".", 1)[-1] in allowed_classes
        ]
        with torch.serialization.safe_globals(substitutes):
            return torch.load(file, map_location="cpu", weights_only=True)

    return _load(path, load)


class _Dtype:
    """Replaces numpy.dtype and allows only types of numbers and text."""

    def __init__(self, code: str, align: bool = False, copy: bool = False) -> None:
        if not isinstance(code, str) or not _DTYPE_PATTERN.fullmatch(code):
            raise pickle.UnpicklingError(f"it uses arrays of {code!r:.40}, which are not allowed")
        self._code = code
        self._order = "="  # byte order of this machine

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        order = state[1]
        compound = state[2:5]  # subarray, names and fields, which are None for numbers and text
        if order not in ("<", ">", "=", "|") or any(part is not None for part in compound):
            raise pickle.UnpicklingError("it uses arrays of a compound type, which are not allowed")
        self._order = order

    def numpy(self) -> np.dtype[Any]:
        return np.dtype(self._code).newbyteorder(self._order)  # type: ignore[arg-type]


@dataclass(eq=False)
class _Array:
    """Replaces numpy.ndarray; `__setstate__` sets `value` when the pickle gives the content."""

    value: Any = None

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, is_fortran, content = state
        self.value = _to_array(content, dtype, shape, "F" if is_fortran else "C")


def _to_array(content: Any, dtype: Any, shape: Any, order: Any = "C") -> np.ndarray[Any, Any]:
    if not isinstance(dtype, _Dtype):
        raise pickle.UnpicklingError("it holds an array without a type")
    if not isinstance(content, str | bytes | bytearray):
        raise pickle.UnpicklingError(f"it holds an array whose content is of {type(content).__name__}, not of bytes")
    data = content.encode("latin1") if isinstance(content, str) else content
    return np.frombuffer(data, dtype.numpy()).reshape(shape, order=order).copy()


class _Call:
    """A function that a pickle may call. It is wrapped, because a pickle could set attributes of a plain function."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *values: Any) -> Any:
        return self._function(*values)

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("it tries to change its reader")


def _encode(text: str, encoding: str) -> bytes:
    """Replaces _codecs.encode, with which Python 2 wrote bytes; allows latin1 only."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"bytes in {encoding!r}, not latin1")
    return text.encode("latin1")


_REPLACEMENTS: dict[str, Any] = {
    "collections.OrderedDict": OrderedDict,
    "_codecs.encode": _Call(_encode),
    "numpy.ndarray": "ndarray",  # pickles only pass it to `_reconstruct`
    "numpy.dtype": _Dtype,
    "numpy.core.multiarray._reconstruct": _Call(lambda *_: _Array()),
    "numpy.core.multiarray.scalar": _Call(lambda dtype, content=b"": _to_array(content, dtype, (1,))[0]),
    "numpy.core.numeric._frombuffer": _Call(
        lambda content, dtype, shape, order: _Array(_to_array(content, dtype, shape, order))
    ),
}


class _ArrayUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return the replacement of a name."""
        full_name = f"{module.replace('numpy._core', 'numpy.core')}.{name}"
        if full_name not in _REPLACEMENTS:
            raise pickle.UnpicklingError(f"it uses {module}.{name}, which is not allowed")
        return _REPLACEMENTS[full_name]


def _unwrap(value: Any) -> Any:
    """Return the value, with arrays instead of their replacements."""
    if isinstance(value, _Array):
        return value.value
    if isinstance(value, dict):
        return {key: _unwrap(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_unwrap(item) for item in value)
    return value


def _load(path: str | Path, read: Callable[[IO[bytes]], Any]) -> Any:
    path = Path(path)
    if not path.is_file():
        raise DiffcapError(f"{path}: file not found; check the path.")
    try:
        with path.open("rb") as file:
            return read(file)
    except Exception as error:  # a damaged pickle may raise any error
        raise DiffcapError(
            f"{path}: refused without running its code: {error_reason(error)}; download the file again from its authors."
        ) from None


def error_reason(error: Exception) -> str:
    """Return why torch's restricted reader or safetensors cannot read a file, without torch's advice to read it unsafely."""
    text = " ".join(str(error).split())
    if refused := _REFUSED_NAME.search(text):
        text = f"it uses {refused[1]}, which is not allowed"
    else:
        text = text.rpartition("WeightsUnpickler error: ")[2].removeprefix("Weights only load failed. ")
        text = _ADVICE.split(text)[0].rstrip(". ") or type(error).__name__
    if text.startswith("Unsupported operand"):
        text += "; torch's restricted reader reads pickle protocol 2 only"
    return "".join(letter for letter in text[:200] if letter.isprintable()).rstrip("., ")
