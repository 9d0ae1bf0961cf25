"""Pickles of others: what is plain comes in, anything else is named and never run."""

import os
import pickle
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from diffcap.utils import unpickling
from diffcap.utils.errors import DiffcapError
from diffcap.utils.unpickling import load_arrays, load_tensors


class AttrDict(dict):
    """As the configuration of some released checkpoints."""


class Hostile:
    """Calls something with some arguments when it is unpickled."""

    def __init__(self, call: Callable[..., Any], *arguments: Any) -> None:
        self.reduced = call, arguments

    def __reduce__(self):
        return self.reduced


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_arrays_come_in(tmp_path, protocol):
    value = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": [1, "two"], "c": np.float64(0.5)}
    (tmp_path / "x.pkl").write_bytes(pickle.dumps(value, protocol))
    loaded = load_arrays(tmp_path / "x.pkl")
    np.testing.assert_array_equal(loaded["a"], value["a"])
    assert (loaded["b"], loaded["c"]) == (value["b"], 0.5)


@pytest.mark.parametrize("new_form", [True, False])
def test_tensors_come_in_with_the_admitted_class(tmp_path, new_form):
    value = {
        "state": OrderedDict(w=torch.randn(3, 2), h=torch.randn(4).half(), p=torch.nn.Parameter(torch.ones(2))),
        "cfg": AttrDict(depth=AttrDict(layers=2)),
    }
    torch.save(value, tmp_path / "x.pt", _use_new_zipfile_serialization=new_form)
    with pytest.raises(DiffcapError, match="AttrDict"):
        load_tensors(tmp_path / "x.pt")
    loaded = load_tensors(tmp_path / "x.pt", allowed_classes=["AttrDict"])
    assert loaded["cfg"]["depth"]["layers"] == 2
    for name, tensor in value["state"].items():
        torch.testing.assert_close(loaded["state"][name], tensor)


def refusal(load: Callable[[Path], Any], file: Path) -> str:
    with pytest.raises(DiffcapError) as error:
        load(file)
    output = str(error.value)
    assert output.startswith(f"{file}: refused without running its code: ") and "\n" not in output
    assert "weights_only" not in output and "torch.load" not in output  # torch's advice to read it unsafely
    return output


@pytest.mark.parametrize("name", ["pathlib.Path.touch", "posix.system", "posix.remove", "sys.exit", "torch.hub.load"])
@pytest.mark.parametrize("form", ["arrays", "new", "old"])
@pytest.mark.parametrize("protocol", [2, 4])
def test_a_hostile_pickle_runs_nothing_and_is_named(tmp_path, name, form, protocol):
    file, touched, kept = tmp_path / "x", tmp_path / "touched", tmp_path / "kept"
    kept.touch()
    evil = {
        "pathlib.Path.touch": Hostile(Path.touch, touched),
        "posix.system": Hostile(os.system, f"touch {touched}"),
        "posix.remove": Hostile(os.remove, str(kept)),
        "sys.exit": Hostile(sys.exit, 3),
        "torch.hub.load": Hostile(torch.hub.load, str(tmp_path), "model"),
    }[name]
    if form == "arrays":
        file.write_bytes(pickle.dumps({"a": evil}, protocol))
    else:
        value = {"state": OrderedDict(w=torch.ones(2)), "a": evil}
        torch.save(value, file, pickle_protocol=protocol, _use_new_zipfile_serialization=form == "new")
    output = refusal(load_arrays if form == "arrays" else load_tensors, file)
    # Before protocol 4 a method of a class is asked for by `getattr`.
    assert name in output or (name.startswith("pathlib") and ("getattr" in output or "pathlib" in output)), output
    assert ("saved with pickle protocol 4" in output) == (protocol == 4 and form != "arrays")
    assert kept.exists() and not touched.exists()


@pytest.mark.parametrize("new_form", [True, False])
@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_another_protocol_is_told_with_the_names_in_it(tmp_path, new_form, protocol):
    value = {"cfg": AttrDict(depth=AttrDict(layers=2)), "more": [AttrDict()], "bytes": b"abc"}
    torch.save(value, tmp_path / "x", pickle_protocol=protocol, _use_new_zipfile_serialization=new_form)
    output = refusal(lambda file: load_tensors(file, allowed_classes=["AttrDict"]), tmp_path / "x")
    assert f"saved with pickle protocol {protocol}, which torch's restricted reader cannot read, only 2; " in output
    assert f"; it uses {AttrDict.__module__}.AttrDict; download" in output


def test_damage_is_one_sentence(tmp_path):
    file = tmp_path / "x"
    for data in (b"", b"garbage\n", pickle.dumps({"a": np.ones(50)})[:60]):
        file.write_bytes(data)
        for load in (load_arrays, load_tensors):
            with pytest.raises(DiffcapError, match=str(file)):
                load(file)
    with pytest.raises(DiffcapError, match="file not found"):
        load_arrays(tmp_path / "none")


def test_compiled_code_is_not_loaded(tmp_path, capsys):
    class Speaks(torch.nn.Module):
        @torch.jit.export
        def __getstate__(self) -> int:
            return 1

        @torch.jit.export
        def __setstate__(self, state: int) -> None:
            self.training = False
            print("code ran on load")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    torch.jit.script(Speaks()).save(str(tmp_path / "x.pt"))
    with pytest.raises(DiffcapError, match=r"refused without running its code: .*TorchScript"):
        load_tensors(tmp_path / "x.pt")
    assert "code ran" not in capsys.readouterr().out


@pytest.mark.parametrize("state", [b"(N(dS'__defaults__'\n(I1\ntst", b"(dS'mine'\nI1\ns"], ids=["slots", "dict"])
@pytest.mark.parametrize(
    "name",
    [
        "numpy.core.multiarray\n_reconstruct",
        "numpy.core.multiarray\nscalar",
        "numpy.core.numeric\n_frombuffer",
        "_codecs\nencode",
        "numpy\ndtype",
    ],
)
def test_a_pickle_changes_none_of_our_functions(tmp_path, name, state):
    (tmp_path / "x.pkl").write_bytes(b"c" + name.encode() + b"\n" + state + b"b.")
    with pytest.raises(DiffcapError, match="without running its code"):
        load_arrays(tmp_path / "x.pkl")
    functions = (unpickling._reconstruct, unpickling._scalar, unpickling._frombuffer, unpickling._encode)
    assert not any(vars(function) for function in functions) and not hasattr(unpickling._Dtype, "mine")
    assert [function.__defaults__ for function in functions] == [None, (b"",), None, None]


def test_the_content_of_an_array_is_bytes(tmp_path):
    class Zeros:
        def __reduce__(self):
            return np.ndarray([]).__reduce__()[0], (np.ndarray, (0,), b"b"), (1, (5,), np.dtype("u1"), False, 5)

    (tmp_path / "x.pkl").write_bytes(pickle.dumps(Zeros()))
    with pytest.raises(DiffcapError, match="an array whose content is of int, not of bytes"):
        load_arrays(tmp_path / "x.pkl")


def test_arrays_of_anything_but_numbers_and_text_are_refused(tmp_path):
    file = tmp_path / "x.pkl"
    compound = np.zeros(2, dtype=[("a", "i4"), ("b", "f8")])
    for value in (np.array([{}, []], dtype=object), compound, np.array(["2020-01-01"], dtype="M8[D]")):
        file.write_bytes(pickle.dumps(value))
        with pytest.raises(DiffcapError, match="not allowed"):
            load_arrays(file)
    value = [
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.array(["ab", "c"]),
        np.arange(3, dtype=">i4"),
        np.bool_(1),
    ]
    for protocol in (0, 2, 5):
        file.write_bytes(pickle.dumps(value, protocol))
        for one, other in zip(load_arrays(file), value):
            np.testing.assert_array_equal(one, other)
