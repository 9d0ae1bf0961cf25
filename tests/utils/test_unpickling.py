"""Pickles of others: what is plain comes in, anything else is named and never run."""

import pickle

import numpy as np
import pytest
import torch

from diffcap.utils.errors import DiffcapError
from diffcap.utils.unpickling import load_arrays, load_tensors


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_arrays_come_in(tmp_path, protocol):
    value = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": [1, "two"], "c": np.float64(0.5)}
    (tmp_path / "x.pkl").write_bytes(pickle.dumps(value, protocol))
    loaded = load_arrays(tmp_path / "x.pkl")
    np.testing.assert_array_equal(loaded["a"], value["a"])
    assert (loaded["b"], loaded["c"]) == (value["b"], 0.5)


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
