"""Read untrusted pickles without running their code.

A pickle is a program that may call anything it can import. Tensors are read by torch's restricted reader. Numpy arrays are read
by replacement classes that accept numbers and text only, because numpy's own classes can be made to read any memory. A pickle
that uses any other name is refused before the name is imported.
"""

import pickle
import pickletools
import re
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np

from diffcap.utils.errors import DiffcapError

_DTYPES = re.compile(r"[<>|=]?([biufc]\d{1,2}|[SU]\d{1,6})")
# torch's message: the name that it refuses, and the beginning of its advice to read the file unsafely.
_REFUSED_NAME = re.compile(r"GLOBAL (\S{1,120}) (?:was not an allowed global|whose module \S+ is blocked)")
_ADVICE = re.compile(r" ?(?:Check the documentation of|Re-running|Please file an issue|In PyTorch 2\.6,)")
# Names that every file of tensors uses.
_TENSOR_NAMES = re.compile(r"collections\.OrderedDict|torch\._utils\._rebuild_\w+|torch\.\w+Storage")


def load_arrays(path: str | Path) -> Any:
    """Read a pickle of plain containers, numbers, text and numpy arrays of these (Python 2's, too)."""
    return _load(path, lambda file: _unwrap(_ArrayUnpickler(file, encoding="latin1").load()))


def state_of_module(module: Any) -> dict[str, Any] | None:
    """Parameters and buffers by name of a torch module that `load_tensors` read with substitutes for its classes.

    Returns:
        None if `module` is something else.
    """
    attributes = getattr(module, "__dict__", {})
    if not isinstance(attributes.get("_modules"), dict):
        return None
    state: dict[str, Any] = {}
    for kind in ("_parameters", "_buffers"):
        state |= {name: value for name, value in attributes.get(kind, {}).items() if value is not None}
    for name, part in attributes["_modules"].items():
        state |= {f"{name}.{inner}": value for inner, value in (state_of_module(part) or {}).items()}
    return state


def load_tensors(path: str | Path, allowed_classes: Sequence[str] = ()) -> Any:
    """Read plain containers and tensors that `torch.save` wrote, in the zip or the legacy format, to the CPU.

    Args:
        path: the file.
        allowed_classes: names of classes of any module, without the module's name; they are replaced by OrderedDict, whose
            instances get the attributes that the pickle sets.
    """
    import torch

    def load(file: IO[bytes]) -> Any:
        substitutes: list[Any] = [
            (_empty_dict if name == "collections.defaultdict" else OrderedDict, name)
            for name in _used_names(file)
            if name.rsplit(".", 1)[-1] in allowed_classes
        ]
        with torch.serialization.safe_globals(substitutes):
            return torch.load(file, map_location="cpu", weights_only=True)

    return _load(path, load)


def _empty_dict(*_: Any) -> OrderedDict[Any, Any]:
    """Replaces collections.defaultdict, which is called with a class."""
    return OrderedDict()


def _used_names(file: IO[bytes]) -> set[str]:
    """The names "module.Name" that a file uses; nothing is imported."""
    import torch

    try:
        return set(torch.serialization.get_unsafe_globals_in_checkpoint(file))
    except ValueError:  # torch cannot list a legacy file: search its bytes for such names
        file.seek(0)
        found = re.findall(rb"c([\w.]+)\n([A-Za-z_]\w*)\n", file.read())
        return {f"{module.decode()}.{name.decode()}" for module, name in found}
    finally:
        file.seek(0)


class _Dtype:
    """Replaces numpy.dtype: types of numbers and text only."""

    def __init__(self, code: str, align: bool = False, copy: bool = False) -> None:
        if not isinstance(code, str) or not _DTYPES.fullmatch(code):
            raise pickle.UnpicklingError(f"it uses arrays of {code!r:.40}, which are not allowed")
        self._code, self._order = code, "="

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        order, compound = state[1], state[2:5]
        if order not in ("<", ">", "=", "|") or any(part is not None for part in compound):
            raise pickle.UnpicklingError("it uses arrays of a compound type, which are not allowed")
        self._order = order

    def numpy(self) -> np.dtype[Any]:
        """The type as a numpy.dtype."""
        return np.dtype(self._code).newbyteorder(self._order)  # type: ignore[arg-type]


class _Array:
    """Replaces numpy.ndarray; `value` is set when the content is known."""

    value: Any = None

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, kind, fortran, content = state
        self.value = _to_array(content, kind, shape, "F" if fortran else "C")


def _to_array(content: Any, kind: Any, shape: Any, order: Any = "C") -> np.ndarray[Any, Any]:
    if not isinstance(kind, _Dtype):
        raise pickle.UnpicklingError("it holds an array without a type")
    if not isinstance(content, str | bytes | bytearray):
        raise pickle.UnpicklingError(f"it holds an array whose content is of {type(content).__name__}, not of bytes")
    data = content.encode("latin1") if isinstance(content, str) else content
    return np.frombuffer(data, kind.numpy()).reshape(shape, order=order).copy()


class _Call:
    """A function that a pickle may call; a pickle could set attributes of a plain function."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *values: Any) -> Any:
        return self._function(*values)

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("it tries to change its reader")


def _reconstruct(kind: Any, shape: Any, code: Any) -> _Array:
    return _Array()


def _frombuffer(content: Any, kind: Any, shape: Any, order: Any) -> _Array:
    array = _Array()
    array.value = _to_array(content, kind, shape, order)
    return array


def _scalar(kind: Any, content: Any = b"") -> Any:
    return _to_array(content, kind, (1,))[0]


def _encode(text: str, encoding: str) -> bytes:
    """Replaces _codecs.encode, with which Python 2 wrote bytes; allows latin1 only."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"bytes in {encoding!r}, not latin1")
    return text.encode("latin1")


def _allowed_names() -> dict[str, Any]:
    names: dict[str, Any] = {
        "collections.OrderedDict": OrderedDict,
        "_codecs.encode": _Call(_encode),
        "numpy.ndarray": "ndarray",  # only passed on to `_reconstruct`
        "numpy.dtype": _Dtype,
    }
    for room in ("numpy.core", "numpy._core"):
        names |= {f"{room}.multiarray._reconstruct": _Call(_reconstruct), f"{room}.multiarray.scalar": _Call(_scalar)}
        names[f"{room}.numeric._frombuffer"] = _Call(_frombuffer)
    return names


class _ArrayUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """The replacement of a name."""
        known = _allowed_names()
        if f"{module}.{name}" not in known:
            raise pickle.UnpicklingError(f"it uses {module}.{name}, which is not allowed")
        return known[f"{module}.{name}"]


def _unwrap(value: Any) -> Any:
    """The value, with arrays instead of their replacements."""
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
            f"{path}: refused without running its code: {error_reason(error, path)}; download the file again from its authors."
        ) from None


def error_reason(error: Exception, path: Path) -> str:
    """Why a file of weights cannot be read, without torch's advice to read it unsafely.

    Args:
        error: raised by torch's restricted reader or by safetensors.
        path: the file; the names that it uses are read from it.
    """
    text = " ".join(str(error).split())
    if asked := _REFUSED_NAME.search(text):
        text = f"it uses {asked[1]}, which is not allowed"
    else:
        text = text.rpartition("WeightsUnpickler error: ")[2].removeprefix("Weights only load failed. ")
        text = _ADVICE.split(text)[0].rstrip(". ") or type(error).__name__
    if text.startswith("Unsupported operand"):
        text = _explain_opcodes(text, path)
    return "".join(letter for letter in text[:200] if letter.isprintable()).rstrip("., ")


def _explain_opcodes(text: str, path: Path) -> str:
    """Explain opcodes that torch's restricted reader does not support: the pickle's protocol and the names that it uses."""
    protocol, names = _protocol_and_names(path)
    if protocol not in (None, 2):
        text = f"saved with pickle protocol {protocol}, which torch's restricted reader cannot read, only 2"
    shown = [name for name in names if not _TENSOR_NAMES.fullmatch(name)]
    return text + (f"; it uses {', '.join(shown[:3])}{', ...' if len(shown) > 3 else ''}" if shown else "")


def _protocol_and_names(path: Path) -> tuple[int | None, list[str]]:
    """The protocol of a file's pickles, and the unique names "module.Name" in them."""
    protocol: int | None = None
    names: dict[str, None] = {}
    texts: list[str] = []  # in the order in which they are pushed; STACK_GLOBAL uses the last two
    memo: dict[int, str] = {}
    for opcode, value in _opcodes(path):
        if opcode == "PROTO":
            protocol, memo = value, {}
        elif opcode in ("GLOBAL", "INST"):
            names[value.replace(" ", ".")] = None
        elif opcode == "STACK_GLOBAL":
            names[".".join(texts[-2:])] = None
        elif opcode.endswith(("MEMOIZE", "PUT")):
            memo[len(memo) if value is None else value] = texts[-1] if texts else ""
        elif opcode.endswith(("UNICODE", "UNICODE8", "GET")):
            texts.append(value if isinstance(value, str) else memo.get(value, ""))
    return protocol, list(names)


def _opcodes(path: Path) -> Iterator[tuple[str, Any]]:
    """The opcodes of a file's pickles with their arguments, up to any damage; none is run."""
    with suppress(Exception), ExitStack() as opened:  # the error was reported before
        if zipfile.is_zipfile(path):
            archive = opened.enter_context(zipfile.ZipFile(path))
            name = next(name for name in archive.namelist() if name.endswith("data.pkl"))
            file: IO[bytes] = opened.enter_context(archive.open(name))
        else:
            file = opened.enter_context(path.open("rb"))
        while True:  # a legacy file has several pickles
            yield from ((opcode.name, value) for opcode, value, _ in pickletools.genops(file))
