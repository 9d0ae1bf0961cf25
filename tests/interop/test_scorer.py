"""Official SCORER checkpoints: names that fit load strictly, names that do not are one sentence."""

from typing import Any

import pytest
import torch
from torch import Tensor

from diffcap.interop.scorer import from_official
from diffcap.models.scorer import SCORER
from diffcap.utils.errors import DiffcapError

WIDTH, WORD, CHANNELS, WORDS = 8, 6, 5, 11
SIZES: dict[str, Any] = {
    "vocabulary_size": WORDS,
    "feature_channels": CHANNELS,
    "grid": (3, 4),
    "max_length": 7,
    "width": WIDTH,
    "heads": 2,
    "word_width": WORD,
}


def linear(base: str, outputs: int, inputs: int, *kernel: int) -> dict[str, tuple[int, ...]]:
    return {f"{base}.weight": (outputs, inputs, *kernel), f"{base}.bias": (outputs,)}


def norm(base: str) -> dict[str, tuple[int, ...]]:
    return {f"{base}.weight": (WIDTH,), f"{base}.bias": (WIDTH,)}


def draw(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Every value different."""
    draws = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=draws) for name, shape in shapes.items()}


def official(encoder_layers: int = 2, cbr: bool = True) -> dict[str, Tensor]:
    """A state dict with the official names."""
    encoder, decoder = "change_detector_state", "speaker_state.core"
    shapes: dict[str, tuple[int, ...]] = {
        **linear(f"{encoder}.img.0", WIDTH, CHANNELS + 2, 1, 1),
        f"{encoder}.w_embedding.weight": (4, WIDTH // 2),
        f"{encoder}.h_embedding.weight": (3, WIDTH // 2),
        **linear(f"{encoder}.embed_fc.0", WIDTH, 2 * WIDTH),
        f"{decoder}.embed.weight": (WORDS, WORD),
        **linear(f"{decoder}.fc.0", WIDTH, WORD),
        **norm(f"{decoder}.fc.2"),
        **linear("speaker_state.logit", WORDS, WIDTH),
    }
    for layer in range(encoder_layers):
        base = f"{encoder}.scorer.{layer}.attention"
        shapes |= {f"{base}.logit_scale": (), **norm(f"{base}.layer_norm")}
        for part in ("query", "key", "value"):
            shapes |= linear(f"{base}.{part}", WIDTH, WIDTH)
    for layer in range(2):
        base = f"{decoder}.layer.{layer}"
        for part in ("query", "key", "value"):
            for attention in ("self_attention", "dec_enc_attention"):
                shapes |= linear(f"{base}.{attention}.{part}", WIDTH, WIDTH)
        shapes |= {**linear(f"{base}.hidden_intermediate.dense", WIDTH, WIDTH), **norm(f"{base}.norm1")}
        shapes |= {**linear(f"{base}.output.dense", WIDTH, WIDTH), **norm(f"{base}.norm2")}
        shapes |= norm(f"{base}.output.LayerNorm")
    if cbr:
        shapes |= linear("cbr.conv1", WIDTH, 2 * WIDTH, 1, 1) | linear("cbr.conv2.0", WIDTH, WIDTH, 1, 1)
        shapes |= {"cbr.mh_att.in_proj_weight": (3 * WIDTH, WIDTH), "cbr.mh_att.out_proj.weight": (WIDTH, WIDTH)}
        shapes |= linear("cbr.contra.query", WIDTH, WIDTH) | linear("cbr.contra.key", WIDTH, WIDTH)
        shapes["cbr.contra.logit_scale"] = ()
    return draw(shapes)


def test_a_whole_checkpoint_loads_strictly() -> None:
    state, model = official(), SCORER(**SIZES)
    ours = from_official(state)
    model.load_state_dict(ours, strict=True)
    assert len({value.data_ptr() for value in ours.values()}) == len(ours)  # no value serves two parameters
    places = {
        "speaker_state.core.layer.1.hidden_intermediate.dense.bias": model.decoder.blocks[1].inner.bias,
        "speaker_state.core.layer.0.output.dense.weight": model.decoder.blocks[0].outer.weight,
        "speaker_state.core.layer.1.output.LayerNorm.weight": model.decoder.blocks[1].norm3.weight,
        "speaker_state.core.layer.1.norm1.bias": model.decoder.blocks[1].norm1.bias,
        "change_detector_state.scorer.1.attention.layer_norm.bias": model.encoder[1].norm.bias,
        "change_detector_state.h_embedding.weight": model.embedding.rows.weight,
        "change_detector_state.scorer.1.attention.logit_scale": model.logit_scale,
        "cbr.contra.key.weight": model.cbr.key.weight,
        "cbr.mh_att.in_proj_weight": model.cbr.attention.qkv.weight,
        "cbr.contra.logit_scale": model.cbr.logit_scale,
        "speaker_state.core.fc.2.weight": model.decoder.input_projection[2].weight,
    }
    for name, parameter in places.items():
        assert torch.equal(parameter, state[name]), name


def test_queries_keys_and_values_are_joined_in_this_order() -> None:
    state = official()
    ours = from_official(state)
    for base, name in {
        "change_detector_state.scorer.1.attention": "encoder.1.attention",
        "speaker_state.core.layer.0.self_attention": "decoder.blocks.0.self_attention",
        "speaker_state.core.layer.1.dec_enc_attention": "decoder.blocks.1.cross",
    }.items():
        for kind in ("weight", "bias"):
            parts = [state[f"{base}.{part}.{kind}"] for part in ("query", "key", "value")]
            assert torch.equal(ours[f"{name}.qkv.{kind}"], torch.cat(parts)), name
    backwards = dict(reversed(state.items()))  # the file's order is nothing to go by
    assert all(torch.equal(value, ours[name]) for name, value in from_official(backwards).items())


def test_convolutions_become_matrices() -> None:
    state = official()
    ours = from_official(state)
    for name, theirs in {
        "embedding.projection.weight": "change_detector_state.img.0.weight",
        "cbr.join.weight": "cbr.conv1.weight",
        "cbr.out.weight": "cbr.conv2.0.weight",
    }.items():
        assert state[theirs].ndim == 4
        assert torch.equal(ours[name], state[theirs][:, :, 0, 0])


def test_an_official_file_without_backward_reasoning() -> None:
    ours = from_official(official(cbr=False))
    assert not any(name.startswith("cbr") for name in ours)
    SCORER(**SIZES, cbr_weight=0.0).load_state_dict(ours, strict=True)


@pytest.mark.parametrize("layers", [1, 2, 11])
def test_the_last_encoder_layers_scale_is_the_one(layers: int) -> None:
    state = official(layers)
    ours = from_official(state)
    assert torch.equal(ours["logit_scale"], state[f"change_detector_state.scorer.{layers - 1}.attention.logit_scale"])
    SCORER(**SIZES, encoder_layers=layers).load_state_dict(ours, strict=True)


@pytest.mark.parametrize(
    "name",
    [
        "change_detector_state.scorer.0.attention.dense.weight",
        "change_detector_state.transformer.0.norm1.weight",
        "speaker_state.core.layer.0.linear1.weight",
        "speaker_state.core.layer.x.norm1.weight",
        "module.speaker_state.logit.weight",
        "img.0.weight",
        "cbr.mh_att.in_proj_bias",
        "word_embedding.weight",
        "",
    ],
)
def test_unknown_parameters_are_one_sentence(name: str) -> None:
    with pytest.raises(DiffcapError, match=r"official SCORER checkpoint: parameter .* is unknown; check that") as error:
        from_official({**official(), name: torch.zeros(1)})
    assert repr(name) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["speaker_state.logit.scale", "change_detector_state.scorer.0.attention.key.gain"])
def test_a_known_layer_has_weight_and_bias_alone(name: str) -> None:
    with pytest.raises(DiffcapError, match="is unknown; check that the checkpoint belongs to this method") as error:
        from_official({**official(), name: torch.zeros(1)})
    assert repr(name) in str(error.value)


@pytest.mark.parametrize("kind", ["weight", "bias"])
@pytest.mark.parametrize("part", ["query", "key", "value"])
def test_a_missing_part_is_one_sentence(part: str, kind: str) -> None:
    state = official()
    for base, name in {
        "change_detector_state.scorer.0.attention": "encoder.0.attention",
        "speaker_state.core.layer.1.self_attention": "decoder.blocks.1.self_attention",
        "speaker_state.core.layer.0.dec_enc_attention": "decoder.blocks.0.cross",
    }.items():
        rest = {key: value for key, value in state.items() if key != f"{base}.{part}.{kind}"}
        assert len(rest) == len(state) - 1
        with pytest.raises(DiffcapError, match="is missing; download the file again") as error:
            from_official(rest)
        assert repr(f"{name}.qkv.{kind}") in str(error.value) and "\n" not in str(error.value)
