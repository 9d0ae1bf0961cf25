"""Other people's pickles, read without running what stands in them.

A pickle is a program: it may call anything it can name. Tensors come in through torch's own restricted reader; numpy arrays
through stand-ins of ours that take numbers and text only, because numpy's own classes can be talked into reading any memory.
Any other name is refused before it is looked up, and said.
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

from diffcap.errors import DiffcapError

_KINDS = re.compile(r"[<>|=]?([biufc]\d{1,2}|[SU]\d{1,6})")
# Torch's words: for a name that it refuses, and where it begins to say how its restricted reader is left out.
_ASKED = re.compile(r"GLOBAL (\S{1,120}) (?:was not an allowed global|whose module \S+ is blocked)")
_ADVICE = re.compile(r" ?(?:Check the documentation of|Re-running|Please file an issue|In PyTorch 2\.6,)")
# The names that every file of tensors asks for.
_OF_TENSORS = re.compile(r"collections\.OrderedDict|torch\._utils\._rebuild_\w+|torch\.\w+Storage")


def load_arrays(path: str | Path) -> Any:
    """A pickle of plain containers, numbers, text and numpy arrays of these (Python 2's, too).

    Raises:
        DiffcapError: missing, damaged, or it names anything else; nothing of it was run.
    """
    return _guarded(path, lambda file: _plain(_Arrays(file, encoding="latin1").load()))


def load_tensors(path: str | Path, admit: Sequence[str] = ()) -> Any:
    """What `torch.save` wrote, in its old form or its new one: plain containers and tensors, on the CPU.

    Args:
        path: the file.
        admit: names of dict-like classes, of whatever module; an OrderedDict stands in their place.

    Raises:
        DiffcapError: missing, damaged, compiled (TorchScript), or it names anything else; nothing of it was run.
    """
    import torch

    def load(file: IO[bytes]) -> Any:
        stand_ins: list[Any] = [(OrderedDict, name) for name in _classes(file) if name.rsplit(".", 1)[-1] in admit]
        with torch.serialization.safe_globals(stand_ins):
            return torch.load(file, map_location="cpu", weights_only=True)

    return _guarded(path, load)


def _classes(file: IO[bytes]) -> set[str]:
    """The names "module.Name" that a file asks for; nothing is built."""
    import torch

    try:
        return set(torch.serialization.get_unsafe_globals_in_checkpoint(file))
    except ValueError:  # an old-form file, which torch cannot list: whatever looks like such a name in it
        file.seek(0)
        found = re.findall(rb"c([\w.]+)\n([A-Za-z_]\w*)\n", file.read())
        return {f"{module.decode()}.{name.decode()}" for module, name in found}
    finally:
        file.seek(0)


class _Dtype:
    """A number's or a text's type."""

    def __init__(self, code: str, align: bool = False, copy: bool = False) -> None:
        if not isinstance(code, str) or not _KINDS.fullmatch(code):
            raise pickle.UnpicklingError(f"it asks for arrays of {code!r:.40}, which are not admitted")
        self._code, self._order = code, "="

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        order, compound = state[1], state[2:5]
        if order not in ("<", ">", "=", "|") or any(part is not None for part in compound):
            raise pickle.UnpicklingError("it asks for arrays of a compound type, which are not admitted")
        self._order = order

    def numpy(self) -> np.dtype[Any]:
        """The type as numpy has it."""
        return np.dtype(self._code).newbyteorder(self._order)  # type: ignore[arg-type]


class _Array:
    """An array before its content is known."""

    value: Any = None

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, kind, fortran, content = state
        self.value = _read(content, kind, shape, "F" if fortran else "C")


def _read(content: Any, kind: Any, shape: Any, order: Any = "C") -> np.ndarray[Any, Any]:
    if not isinstance(kind, _Dtype):
        raise pickle.UnpicklingError("it holds an array without a type")
    if not isinstance(content, str | bytes | bytearray):
        raise pickle.UnpicklingError(f"it holds an array whose content is of {type(content).__name__}, not of bytes")
    data = content.encode("latin1") if isinstance(content, str) else content
    return np.frombuffer(data, kind.numpy()).reshape(shape, order=order).copy()


class _Call:
    """A function that a pickle may call and not change: what it names, it may otherwise set attributes of."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *values: Any) -> Any:
        return self._function(*values)

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("it asks to change what reads it")


def _reconstruct(kind: Any, shape: Any, code: Any) -> _Array:
    return _Array()


def _frombuffer(content: Any, kind: Any, shape: Any, order: Any) -> _Array:
    array = _Array()
    array.value = _read(content, kind, shape, order)
    return array


def _scalar(kind: Any, content: Any = b"") -> Any:
    return _read(content, kind, (1,))[0]


def _encode(text: str, encoding: str) -> bytes:
    """What Python 2's way of writing bytes needs, and no other codec."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"bytes in {encoding!r}, not latin1")
    return text.encode("latin1")


def _names() -> dict[str, Any]:
    names: dict[str, Any] = {
        "collections.OrderedDict": OrderedDict,
        "_codecs.encode": _Call(_encode),
        "numpy.ndarray": "ndarray",  # only ever handed on to `_reconstruct`
        "numpy.dtype": _Dtype,
    }
    for room in ("numpy.core", "numpy._core"):
        names |= {f"{room}.multiarray._reconstruct": _Call(_reconstruct), f"{room}.multiarray.scalar": _Call(_scalar)}
        names[f"{room}.numeric._frombuffer"] = _Call(_frombuffer)
    return names


class _Arrays(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """The stand-in of a name."""
        known = _names()
        if f"{module}.{name}" not in known:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is not admitted")
        return known[f"{module}.{name}"]


def _plain(value: Any) -> Any:
    """The same with arrays in the place of their stand-ins."""
    if isinstance(value, _Array):
        return value.value
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_plain(item) for item in value)
    return value


def _guarded(path: str | Path, read: Callable[[IO[bytes]], Any]) -> Any:
    path = Path(path)
    if not path.is_file():
        raise DiffcapError(f"{path}: no such file; check the path.")
    try:
        with path.open("rb") as file:
            return read(file)
    except Exception as error:  # a damaged pickle may fail in any way at all
        raise DiffcapError(
            f"{path}: refused, nothing of it was run: {reason_of(error, path)}; fetch the file again, from its authors."
        ) from None


def reason_of(error: Exception, path: Path) -> str:
    """Why a file of weights cannot be read, without torch's advice to read it unsafely.

    Args:
        error: what torch's restricted reader or safetensors made of the file. path: its, for the names that it asks for.
    """
    text = " ".join(str(error).split())
    if asked := _ASKED.search(text):
        text = f"it asks for {asked[1]}, which is not admitted"
    else:
        text = text.rpartition("WeightsUnpickler error: ")[2].removeprefix("Weights only load failed. ")
        text = _ADVICE.split(text)[0].rstrip(". ") or type(error).__name__
    if text.startswith("Unsupported operand"):
        text = _of_other_operands(text, path)
    return "".join(letter for letter in text[:200] if letter.isprintable()).rstrip("., ")


def _of_other_operands(text: str, path: Path) -> str:
    """What to say of a pickle with operands that torch's reader has not: its protocol, and the names that it asks for."""
    protocol, names = _protocol_and_names(path)
    if protocol not in (None, 2):
        text = f"saved with pickle protocol {protocol}, which torch's restricted reader cannot read, only 2"
    shown = [name for name in names if not _OF_TENSORS.fullmatch(name)]
    return text + (f"; it asks for {', '.join(shown[:3])}{', ...' if len(shown) > 3 else ''}" if shown else "")


def _protocol_and_names(path: Path) -> tuple[int | None, list[str]]:
    """The protocol of a file's pickles, and the names "module.Name" in them, each once."""
    protocol: int | None = None
    names: dict[str, None] = {}
    texts: list[str] = []  # in the order in which they are pushed: the two last are a STACK_GLOBAL's name
    memo: dict[int, str] = {}
    for operand, value in _operands(path):
        if operand == "PROTO":
            protocol, memo = value, {}
        elif operand in ("GLOBAL", "INST"):
            names[value.replace(" ", ".")] = None
        elif operand == "STACK_GLOBAL":
            names[".".join(texts[-2:])] = None
        elif operand.endswith(("MEMOIZE", "PUT")):
            memo[len(memo) if value is None else value] = texts[-1] if texts else ""
        elif operand.endswith(("UNICODE", "UNICODE8", "GET")):
            texts.append(value if isinstance(value, str) else memo.get(value, ""))
    return protocol, list(names)


def _operands(path: Path) -> Iterator[tuple[str, Any]]:
    """The operands of a file's pickles with what stands behind each, up to any damage; none is run."""
    with suppress(Exception), ExitStack() as opened:  # whatever is wrong with the file has been found before
        if zipfile.is_zipfile(path):
            archive = opened.enter_context(zipfile.ZipFile(path))
            name = next(name for name in archive.namelist() if name.endswith("data.pkl"))
            file: IO[bytes] = opened.enter_context(archive.open(name))
        else:
            file = opened.enter_context(path.open("rb"))
        while True:  # the old form has several, one behind another
            yield from ((operand.name, value) for operand, value, _ in pickletools.genops(file))
