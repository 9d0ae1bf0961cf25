"""Official IDC-PCL checkpoints: names that fit load strictly, names that do not are one sentence."""

from typing import Any

import pytest
import torch
from torch import Tensor

from diffcap.interop.pcl import from_official
from diffcap.models.pcl import PCL
from diffcap.models.pcl_pretraining import PCLPretraining
from diffcap.utils.errors import DiffcapError

WIDTH, FFN, CHANNELS, WORDS = 8, 12, 5, 10
SIZES: dict[str, Any] = {"vocabulary_size": WORDS, "feature_channels": CHANNELS, "width": WIDTH, "heads": 2, "ffn": FFN}


def official(stage: str, layers: int = 2) -> dict[str, Tensor]:
    """A state dict with the official names, every value different."""
    shapes: dict[str, tuple[int, ...]] = {
        "word_embedding.weight": (WORDS, WIDTH),
        "img_project.0.weight": (WIDTH, CHANNELS),
        "img_project.0.bias": (WIDTH,),
        "position_encoding.type_pe.weight": (7, WIDTH),
        "position_encoding.layernorm.a_2": (WIDTH,),
        "position_encoding.layernorm.b_2": (WIDTH,),
        "output_layer.weight": (WORDS, WIDTH),
        "output_layer.bias": (WORDS,),
        "pooler.0.weight": (2, (3 if stage == "pretrain" else 2) * WIDTH),
        "pooler.0.bias": (2,),
    }
    if stage == "pretrain":
        shapes |= {
            "feat_regress.weight": (WIDTH, CHANNELS),
            "feat_regress.bias": (CHANNELS,),
            "feat_regress.net.0.weight": (WIDTH, WIDTH),
            "feat_regress.net.0.bias": (WIDTH,),
            "feat_regress.net.2.a_2": (WIDTH,),
            "feat_regress.net.2.b_2": (WIDTH,),
            "classifier.0.weight": (555, WIDTH),
            "classifier.0.bias": (555,),
            "aligner.0.weight": (2, 2 * WIDTH),
            "aligner.0.bias": (2,),
        }
    for stack, count in (("single_img_encoder", 1), ("double_img_encoder", 1), ("encoder", layers)):
        shapes |= {f"{stack}.norm.{name}": (WIDTH,) for name in ("a_2", "b_2")}
        for layer in range(count):
            base = f"{stack}.layers.{layer}"
            for part in ("q_linear", "k_linear", "v_linear", "out"):
                shapes |= {f"{base}.attn.{part}.weight": (WIDTH, WIDTH), f"{base}.attn.{part}.bias": (WIDTH,)}
            shapes |= {f"{base}.feed_forward.w_1.weight": (FFN, WIDTH), f"{base}.feed_forward.w_1.bias": (FFN,)}
            shapes |= {f"{base}.feed_forward.w_2.weight": (WIDTH, FFN), f"{base}.feed_forward.w_2.bias": (WIDTH,)}
            shapes |= {f"{base}.sublayer.{n}.norm.{name}": (WIDTH,) for n in (0, 1) for name in ("a_2", "b_2")}
    draws = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=draws) for name, shape in shapes.items()}


@pytest.mark.parametrize(("stage", "kind"), [("pretrain", PCLPretraining), ("finetune", PCL)])
def test_a_whole_checkpoint_loads_strictly(stage: str, kind: type) -> None:
    state = official(stage)
    ours = from_official(state, stage)
    model = kind(**SIZES, cross_layers=2)
    model.load_state_dict(ours, strict=True)
    assert len({value.data_ptr() for value in ours.values()}) == len(ours)  # no value serves two parameters
    queries, keys, values = model.trunk.cross_encoder.layers[1].attention.qkv.weight.split(WIDTH)
    for letter, rows in zip("qkv", (queries, keys, values)):
        assert torch.equal(rows, state[f"encoder.layers.1.attn.{letter}_linear.weight"])
    assert torch.equal(
        model.trunk.pair_encoder.layers[0].ffn_norm.bias, state["double_img_encoder.layers.0.sublayer.1.norm.b_2"]
    )


def test_the_heads_of_nabirds_come_along_when_asked_for() -> None:
    state = official("pretrain")
    model = PCLPretraining(**SIZES, cross_layers=2, classes=555)
    model.load_state_dict(from_official(state, "pretrain", fine_grained=True), strict=True)
    assert torch.equal(model.matcher.weight, state["aligner.0.weight"])
    del state["aligner.0.bias"]
    with pytest.raises(DiffcapError, match=r"'aligner\.0\.bias' is missing \(1 missing"):
        from_official(state, "pretrain", fine_grained=True)


def test_a_captioner_of_birds_has_no_distractor_head() -> None:
    state = {name: value for name, value in official("finetune").items() if not name.startswith("pooler")}
    PCL(**SIZES, cross_layers=2, distractor_judging=False).load_state_dict(
        from_official(state, "finetune"), strict=True
    )


@pytest.mark.parametrize("stage", ["pretrain", "finetune"])
def test_every_missing_parameter_is_named(stage: str) -> None:
    state = official(stage)
    optional = ("pooler", "feat_regress.weight", "classifier", "aligner")
    for name in state:
        if name.startswith(optional):
            continue
        rest = {key: value for key, value in state.items() if key != name}
        with pytest.raises(DiffcapError, match=f"'{name}' is missing \\(1 missing"):
            from_official(rest, stage)


@pytest.mark.parametrize(
    "name",
    [
        "encoder.norm.gamma",
        "encoder.norm",
        "encoder.layers.0.attn.out.scale",
        "encoder.layers.0.attn.q_linear.scale",
        "encoder.layers.0.attn.rotary.weight",
        "encoder.layers",
        "visual.proj",
        "module.word_embedding.weight",
        "feat_regress.net.0.weight",
    ],
)
def test_unknown_parameters_are_one_sentence(name: str) -> None:
    with pytest.raises(DiffcapError, match="is unknown; check that the checkpoint belongs to this method") as error:
        from_official({**official("finetune"), name: torch.zeros(1)}, "finetune")
    assert repr(name) in str(error.value) and "\n" not in str(error.value)


def test_a_checkpoint_of_the_other_stage_is_refused() -> None:
    with pytest.raises(
        DiffcapError, match=r"feat_regress\.bias' is missing \(5 missing parameters for the pretrain stage\); download"
    ):
        from_official(official("finetune"), "pretrain")
    with pytest.raises(DiffcapError, match="feat_regress"):
        from_official(official("pretrain"), "finetune")
