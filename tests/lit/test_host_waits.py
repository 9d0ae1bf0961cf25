"""How often decoding and writing captions wait for a GPU, with tensors on the CPU that count as a GPU's; extraction writes later."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from tests.lit.test_finetuning import SHAPE, folder, module_of  # noqa: F401
from tests.models.test_contract import LENGTH, PAIRS, case, closing
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from diffcap.features.store import FeatureStore
from diffcap.features.writer import StoreWriter
from diffcap.lit.decoding import Decoding
from diffcap.lit.extraction import StoreFiller
from diffcap.lit.finetuning import Captioning
from diffcap.models import generation
from diffcap.models.generation import beam_search, greedy, sample_from
from diffcap.pair_captioner import load_captioner
from diffcap.text.vocabularies import restore_vocabulary
from diffcap.utils.host_copy import HostCopy

DRAWS = torch.rand(PAIRS, LENGTH - 1, generator=torch.Generator().manual_seed(0))
DECODINGS: list[Any] = [
    lambda model, *pair: greedy(model, model.encode(*pair), LENGTH),
    lambda model, *pair: beam_search(model, model.encode(*pair), LENGTH, 3),
    lambda model, *pair: sample_from(model, model.encode(*pair), DRAWS[: len(pair[0])]),
]
READS = {"item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__index__", "__float__", "nonzero", "masked_select"}


class OnDevice(Tensor):
    """Counts as a tensor of a GPU, as does everything that is computed from it."""

    is_cpu = False


def on_device(tensor: Tensor) -> Tensor:
    return tensor.as_subclass(OnDevice)


def on_host(value: Any) -> Any:
    return value.as_subclass(Tensor) if isinstance(value, OnDevice) else value


class Waits(TorchFunctionMode):
    """Collects the functions that read a value of the device, or copy one to it (`torch.tensor`)."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, is_read = func.__name__, bool(args) and isinstance(args[0], OnDevice) and func.__name__ in READS
        masks = [part for part in tree_map(on_host, args[1:]) if isinstance(part, Tensor) and part.dtype == torch.bool]
        if is_read or name in ("tensor", "as_tensor") or (name == "__getitem__" and masks):
            self.found.append(name)
        result = func(*(tree_map(on_host, args) if is_read else args), **(kwargs or {}))
        return on_host(result) if is_read else result


@contextmanager
def counted_waits() -> Iterator[list[str]]:
    with Waits() as counter:

        def wait(copy: HostCopy) -> list[Tensor]:
            counter.found.append("HostCopy")
            return [on_host(tensor) for tensor in copy._copies]

        with mock.patch.object(HostCopy, "wait", wait):
            yield counter.found


@pytest.mark.parametrize("name", ["pcl", "scorer", "dirl", "clip4idc, released", "rsiccformer", "chg2cap"])
@torch.no_grad()
def test_a_decoding_waits_once_in_eight_words_for_the_same_captions(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert generation.WORDS_PER_WAIT == 8
    model, pair, _ = case(name)
    closing(model, pair, name.partition(",")[0])
    for first, decode in itertools.product((0, 5), DECODINGS):  # the longest captions have several lengths
        some = tree_map(lambda images, first=first: on_device(images[first:]), pair)
        found = {}
        for words in (1, 3, 8):
            monkeypatch.setattr(generation, "WORDS_PER_WAIT", words)
            with counted_waits() as waits:
                found[words] = decode(model, *some)
            assert torch.equal(found[words], found[1]), words
            assert waits == ["tolist"] * -(-(found[1].shape[-1] - 1) // words), words


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "smolvlm", "internvl", "llava_onevision", "gemma3"])
@torch.no_grad()
def test_a_word_of_a_vision_language_model_needs_no_value_of_the_device(family: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    from tests.tiny_vlms import build

    from diffcap.methods.vlm.model import VLM

    vlm = VLM(str(build(family, tmp_path)), train="nothing").eval()
    small, large = (torch.randint(0, 256, (3, side, 96), dtype=torch.uint8) for side in (64, 128))
    for images in ([small, small], [small, large]):  # the second prompts of Qwen differ in length, so one is padded
        memory = tree_map(on_device, vlm.encode(images, images))
        with counted_waits() as waits:
            logits, _ = vlm.step(on_device(torch.full((2,), vlm.bos_id)), memory, None)
            assert isinstance(vlm.is_eos(logits.argmax(-1)), OnDevice)
        assert not waits


def test_validation_writes_the_words_of_a_batch_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    module = module_of(folder, "rcc", monkeypatch)
    module.setup("fit")
    monkeypatch.setattr(Captioning, "add_validation_losses", lambda *_: None)
    maps = on_device(torch.randn(4, *SHAPE))
    batch = {"id": list(module.feature_data.val_references)[:4], "before": maps, "after": maps.flip(0)}
    with torch.no_grad(), counted_waits() as waits:
        module.eval().validation_step(batch, 0)
    assert waits == ["tolist"] * len(waits) and len(waits) <= 3 + 1  # 19 words, then the ids


@pytest.mark.parametrize("beams", [1, 3])
def test_captioning_writes_the_words_of_a_batch_at_once(beams: int) -> None:
    model, pair, _ = case("scorer")
    vocabulary = restore_vocabulary([f"w{number}" for number in range(20)], "rcc")
    module = Decoding(SimpleNamespace(captioner=model, vocabulary=vocabulary, max_length=LENGTH), beams)  # type: ignore[arg-type]
    with torch.no_grad(), counted_waits() as waits:
        module.predict_step({"id": "abcdef", "before": on_device(pair[0]), "after": on_device(pair[1])}, 0)
    assert waits == ["tolist", "cpu"]
    captioner = load_captioner(device="cpu")
    inputs: Any = [captioner._preprocess("examples/before.png", "examples/after.png")] * 2
    sentences = [torch.tensor(captioner.vocabulary.encode("nothing has changed", captioner.max_length)), None]
    expected = captioner._generate(inputs, beams, 0.0, sentences)
    features = tuple(map(on_device, captioner._compute_features(inputs)))
    with mock.patch.object(captioner, "_compute_features", lambda _: features), counted_waits() as waits:
        assert captioner._generate(inputs, beams, 0.0, sentences) == expected
    # Beam search also decodes greedily.
    decoding = {1: 1, 3: 2}[beams] * -(-(captioner.max_length - 1) // 8)
    assert waits.count("HostCopy") == 1 and waits.count("tolist") == len(waits) - 1 <= decoding


def test_features_are_written_one_batch_later(tmp_path: Path) -> None:
    writer = StoreWriter(tmp_path, list("abcde"), (2, 1, 1), {"library": "test"})
    filler, features = StoreFiller(writer, writer.missing_rows()), torch.arange(10.0).view(5, 2, 1, 1)
    with mock.patch.object(writer, "write", wraps=writer.write) as write:
        for rows, num_written in ([0, 1], 0), ([2, 3], 1), ([], 2), ([4], 2):
            batch: Any = SimpleNamespace(rows=torch.tensor(rows, dtype=torch.int64), problems=[])
            filler.write_on_batch_end(None, None, features[rows] if rows else None, None, batch)
            assert write.call_count == num_written
        filler.on_predict_end(SimpleNamespace(global_rank=0, is_global_zero=True), None)  # type: ignore[arg-type]
    assert torch.equal(torch.from_numpy(FeatureStore.open(tmp_path).read(torch.arange(5).numpy())).float(), features)
