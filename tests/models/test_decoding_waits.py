"""The host waits for the device once in eight words of a decoding."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.test_contract import LENGTH, PAIRS, case, closing
from tests.on_device import OnDevice, counted_waits, on_device
from torch.utils._pytree import tree_map

from diffcap.models import generation
from diffcap.models.generation import beam_hypotheses, greedy, sample_from

DRAWS = torch.rand(PAIRS, LENGTH - 1, generator=torch.Generator().manual_seed(0))
WAYS: dict[str, Any] = {
    "greedy": lambda model, pair: greedy(model, *pair, LENGTH),
    "beams": lambda model, pair: beam_hypotheses(model, *pair, LENGTH, 3),
    "drawn": lambda model, pair: sample_from(model, model.encode(*pair), DRAWS[: len(pair[0])]),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["pcl", "scorer", "dirl", "clip4idc, released", "rsiccformer", "chg2cap"])
@torch.no_grad()
def test_the_host_waits_once_in_several_words_for_the_same_captions(
    name: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert generation.WORDS_PER_WAIT == 8
    model, pair, _ = case(name)
    closing(model, pair, name.partition(",")[0])
    for first in (0, 3, 5):  # the longest caption of each batch has another length
        some = tree_map(lambda images, first=first: on_device(images[first:]), pair)
        found = {}
        for words in (1, 3, 8):
            monkeypatch.setattr(generation, "WORDS_PER_WAIT", words)
            with counted_waits() as waits:
                found[words] = WAYS[way](model, some)
            longest = found[1].shape[-1] - 1
            assert waits == ["tolist"] * -(-longest // words), words
            assert torch.equal(found[words], found[1]), words


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
        memory, cache = tree_map(on_device, vlm.encode(images, images)), None
        with counted_waits() as waits:
            for _ in range(2):
                logits, cache = vlm.step(on_device(torch.full((2,), vlm.bos_id)), memory, cache)
                assert isinstance(vlm.is_eos(logits.argmax(-1)), OnDevice)
        assert not waits
