"""Names of parameters in official files; tests/parity shows that whole files load strictly and compute the authors' numbers."""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from tests.parity.loading import FIXTURES, load, with_statistics
from torch import Tensor

from diffcap.checkpoints.importing import ImportOptions
from diffcap.methods import dirl
from diffcap.methods.clip4idc import official as clip4idc
from diffcap.methods.pcl import official as pcl
from diffcap.methods.pcl.model import PCL
from diffcap.methods.remote_sensing import chg2cap, rsiccformer
from diffcap.methods.scorer import model as scorer
from diffcap.utils.errors import DiffcapError


class System(NamedTuple):
    """A fixture with the names of an official file, and the function that renames them."""

    fixture: str
    group: str | None
    rename: Callable[[dict[str, Tensor]], dict[str, Tensor]]


SYSTEMS = {
    "pcl, pretrain": System("pcl", "pretrain", lambda state: pcl.from_official(state, "pretrain")),
    "pcl, finetune": System("pcl", "finetune", lambda state: pcl.from_official(state, "finetune")),
    "scorer": System("scorer", None, scorer.from_official),
    "dirl": System("dirl_clevr_change", None, lambda state: dirl.IMPORTER.rename(state, "finetune")),
    "dirl, ln_xavier": System("dirl_clevr_dc", None, lambda state: dirl.IMPORTER.rename(state, "finetune")),
    "clip4idc": System("clip4idc", "caption", lambda state: clip4idc.from_official(state, "finetune")),
    "rsiccformer": System("rsiccformer", None, lambda state: rsiccformer.IMPORTER.rename(state, "finetune")),
    "chg2cap": System("chg2cap", None, lambda state: chg2cap.IMPORTER.rename(state, "finetune")),
}
ODD_NAMES = [
    *("", "visual.proj.extra", "module.word_embedding.weight", "backbone.conv1.weight", "img.0.weight"),
    *("encoder.norm.gamma", "encoder.layers", "encoder.layers.0.attn.out.scale", "encoder.layers.0.attn.rotary.weight"),
    *("speaker_state.logit.gain", "speaker_state.core.layer.x.norm1.weight", "speaker_state.core.layer.0.linear3.bias"),
    *("change_detector_state.scorer.0.attention.key.gain", "change_detector_state.transformer.0.norm2.weight"),
    *("cbr.mh_att.in_proj_bias", "decoder.extra.weight", "encoder_feat.transformer.0.norm3.weight"),
]


@cache
def state_of(name: str) -> dict[str, Tensor]:
    fixture = load(FIXTURES / f"{SYSTEMS[name].fixture}.json")
    return fixture.weights(SYSTEMS[name].group) if SYSTEMS[name].group else with_statistics(fixture)


@pytest.mark.parametrize("odd", ODD_NAMES)
@pytest.mark.parametrize("name", SYSTEMS)
def test_an_unknown_parameter_is_one_sentence(name: str, odd: str) -> None:
    with pytest.raises(DiffcapError, match="is unknown; check that the checkpoint belongs to this method") as error:
        SYSTEMS[name].rename({**state_of(name), odd: torch.zeros(1)})
    assert repr(odd) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("name", SYSTEMS)
def test_the_file_of_another_system_is_refused(name: str) -> None:
    for other in SYSTEMS:
        if other.partition(",")[0] != name.partition(",")[0]:
            with pytest.raises(DiffcapError, match=r"is (unknown|missing)"):
                SYSTEMS[name].rename(state_of(other))


def test_a_captioner_of_birds_has_no_distractor_head() -> None:
    fixture = load(FIXTURES / "pcl.json")
    sizes: dict[str, Any] = {key: fixture.hyperparameters[key] for key in ("width", "heads", "ffn", "cross_layers")}
    state = {name: value for name, value in state_of("pcl, finetune").items() if not name.startswith("pooler")}
    model = PCL(20, fixture.hyperparameters["feature_width"], **sizes, distractor_judging=False)
    model.load_state_dict(pcl.from_official(state, "finetune"), strict=True)


@pytest.mark.parametrize("part", ["query.weight", "key.bias", "value.weight"])
def test_a_missing_part_of_scorers_attention_is_named(part: str) -> None:
    state = state_of("scorer")
    for base, name in {
        "change_detector_state.scorer.0.attention": "encoder.0.attention",
        "speaker_state.core.layer.1.self_attention": "decoder.blocks.1.self_attention",
        "speaker_state.core.layer.0.dec_enc_attention": "decoder.blocks.0.cross",
    }.items():
        rest = {key: value for key, value in state.items() if key != f"{base}.{part}"}
        with pytest.raises(DiffcapError, match="is missing; download the file again") as error:
            scorer.from_official(rest)
        assert repr(f"{name}.qkv.{part.partition('.')[2]}") in str(error.value)


def test_the_scale_of_scorers_last_encoder_layer_is_the_one() -> None:
    scales = {f"change_detector_state.scorer.{n}.attention.logit_scale": torch.tensor(float(n)) for n in range(11)}
    assert scorer.from_official(scales) == {"logit_scale": torch.tensor(10.0)}


def test_the_authors_network_of_clip4idc_has_its_name() -> None:
    """Fine-tuning compares the names of the networks and the numbers of intra layers of its settings and of a checkpoint."""
    shapes = {
        "visual.conv1.weight": (768, 3, 32, 32),
        "visual.positional_embedding": (50, 768),
        "visual.proj": (768, 512),
        "positional_embedding": (77, 512),
        "token_embedding.weight": (49408, 512),
        **{f"visual.transformer.resblocks.{n}.ln_1.bias": (1,) for n in range(12)},
        **{f"transformer.resblocks.{n}.ln_1.bias": (1,) for n in range(12)},
    }
    state = {f"clip.{name}": torch.empty(shape, device="meta") for name, shape in shapes.items()}
    model = clip4idc.official_sizes(state, ImportOptions()).model
    assert model["network"] == "ViT-B-32-quickgelu" and model["intra_layers"] == 9
