"""Official DIRL checkpoints, both decoder variants: names that fit load strictly, names that do not are one sentence."""

from typing import Any

import pytest
import torch
from tests.interop.test_scorer import CHANNELS, SIZES, WIDTH, WORD, WORDS, draw, linear, norm
from tests.interop.test_scorer import official as official_scorer
from torch import Tensor

from diffcap.interop.dirl import from_official
from diffcap.models.dirl import DIRL
from diffcap.utils.errors import DiffcapError

FFN, PROJECTOR = 12, 10
VARIANTS = ["plain", "ln_xavier"]


def attention(base: str) -> dict[str, tuple[int, ...]]:
    return {
        f"{base}.in_proj_weight": (3 * WIDTH, WIDTH),
        f"{base}.in_proj_bias": (3 * WIDTH,),
        **linear(f"{base}.out_proj", WIDTH, WIDTH),
    }


def official(variant: str, projector: bool = True) -> dict[str, Tensor]:
    """A state dict with the official names."""
    encoder, decoder = "change_detector_state", "speaker_state.core"
    shapes: dict[str, tuple[int, ...]] = {
        **linear(f"{encoder}.img.0", WIDTH, CHANNELS + 2, 1, 1),
        f"{encoder}.w_embedding.weight": (4, WIDTH // 2),
        f"{encoder}.h_embedding.weight": (3, WIDTH // 2),
        f"{decoder}.embed.weight": (WORDS, WORD),
        **linear(f"{decoder}.fc.0", WIDTH, WORD),
        **linear(f"{decoder}.embed_fc.0", WIDTH, 2 * WIDTH),
        **linear("speaker_state.logit", WORDS, WIDTH),
    }
    if variant == "ln_xavier":
        shapes |= norm(f"{decoder}.fc.1") | norm(f"{decoder}.embed_fc.1")
    if projector:
        shapes |= linear(f"{encoder}.mlp.0", PROJECTOR, WIDTH) | linear(f"{encoder}.mlp.3", WIDTH, PROJECTOR)
    for layer in range(2):
        base = f"{encoder}.transformer.{layer}"
        shapes |= attention(f"{base}.attention") | norm(f"{base}.norm1")
        base = f"{decoder}.layer.{layer}"
        shapes |= attention(f"{base}.self_att") | attention(f"{base}.cross_att")
        shapes |= linear(f"{base}.linear1", FFN, WIDTH) | linear(f"{base}.linear2", WIDTH, FFN)
        shapes |= norm(f"{base}.norm1") | norm(f"{base}.norm2") | norm(f"{base}.norm3")
    return draw(shapes)


def model_of(variant: Any, **options: Any) -> DIRL:
    return DIRL(**SIZES, ffn=FFN, projector_width=PROJECTOR, decoder_variant=variant, **options)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_whole_checkpoint_loads_strictly(variant: str) -> None:
    state, model = official(variant), model_of(variant)
    ours = from_official(state)
    model.load_state_dict(ours, strict=True)
    assert len({value.data_ptr() for value in ours.values()}) == len(ours) == len(state)
    places = {
        "change_detector_state.transformer.1.attention.in_proj_weight": model.encoder[1].attention.qkv.weight,
        "change_detector_state.transformer.0.attention.out_proj.bias": model.encoder[0].attention.out.bias,
        "change_detector_state.transformer.0.norm1.weight": model.encoder[0].norm.weight,
        "change_detector_state.w_embedding.weight": model.embedding.columns.weight,
        "change_detector_state.mlp.3.bias": model.projector[3].bias,
        "speaker_state.core.layer.0.self_att.in_proj_bias": model.decoder.blocks[0].self_attention.qkv.bias,
        "speaker_state.core.layer.1.cross_att.out_proj.weight": model.decoder.blocks[1].cross.out.weight,
        "speaker_state.core.layer.1.linear1.bias": model.decoder.blocks[1].ffn[0].bias,
        "speaker_state.core.layer.0.linear2.weight": model.decoder.blocks[0].ffn[3].weight,
        "speaker_state.core.layer.1.norm2.bias": model.decoder.blocks[1].norm2.bias,
        "speaker_state.core.embed_fc.0.weight": model.fusion[0].weight,
    }
    if variant == "ln_xavier":
        places["speaker_state.core.fc.1.weight"] = model.decoder.input_projection[1].weight
        places["speaker_state.core.embed_fc.1.bias"] = model.fusion[1].bias
    for name, parameter in places.items():
        assert torch.equal(parameter, state[name]), name
    image = state["change_detector_state.img.0.weight"]
    assert image.ndim == 4 and torch.equal(model.embedding.projection.weight, image[:, :, 0, 0])


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_variants_file_is_not_the_others(variant: str) -> None:
    other = VARIANTS[1 - VARIANTS.index(variant)]
    with pytest.raises(RuntimeError, match=r"decoder\.lift\.1\.weight.*fusion\.1\.weight|fusion\.1"):
        model_of(other).load_state_dict(from_official(official(variant)), strict=True)


def test_a_file_without_the_projector() -> None:
    ours = from_official(official("plain", projector=False))
    model_of("plain", decorrelation_weight=0.0).load_state_dict(ours, strict=True)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    "name",
    [
        "change_detector_state.transformer.0.attention.in_proj_scale",
        "change_detector_state.transformer.0.norm2.weight",
        "change_detector_state.embed_fc.0.weight",
        "speaker_state.core.layer.0.self_att.query.weight",
        "speaker_state.core.layer.0.linear3.weight",
        "cbr.conv1.weight",
        "logit.weight",
    ],
)
def test_unknown_parameters_are_one_sentence(variant: str, name: str) -> None:
    with pytest.raises(DiffcapError, match=r"official DIRL checkpoint: parameter .* is unknown; check that") as error:
        from_official({**official(variant), name: torch.zeros(1)})
    assert repr(name) in str(error.value) and "\n" not in str(error.value)


def test_a_scorer_checkpoint_is_refused() -> None:
    with pytest.raises(
        DiffcapError, match=r"official DIRL checkpoint: parameter .* is unknown; check that the checkpoint"
    ):
        from_official(official_scorer(cbr=False))
