"""CLIP4IDC against the authors' implementation, both stages: every array of the fixture."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.parity.loading import Fixture, assert_close, load

from diffcap.losses.pair_text import pair_text_contrastive_loss
from diffcap.methods.clip4idc.model import CLIP4IDC, CLIP4IDCAdaptation
from diffcap.methods.clip4idc.official import from_official
from diffcap.models.captioner import Batch


@pytest.fixture
def official(clip4idc_fixture: Path) -> Fixture:
    return load(clip4idc_fixture)


def sizes(official: Fixture) -> dict[str, Any]:
    """The network of a fixture; its pixels are normalised already, so the tower has to leave them as they are."""
    metadata = official.hyperparameters
    return {
        "network": {
            "embed_dim": metadata["embed"],
            "quick_gelu": True,
            "vision_cfg": {
                "image_size": metadata["image_size"],
                "patch_size": metadata["patch"],
                "width": metadata["vision_width"],
                "head_width": metadata["vision_width"] // metadata["vision_heads"],
                "layers": metadata["vision_layers"],
            },
            "text_cfg": {
                "context_length": metadata["context"],
                "vocab_size": metadata["vocabulary"],
                "width": metadata["text_width"],
                "heads": metadata["text_heads"],
                "layers": metadata["text_layers"],
            },
        },
        "intra_layers": metadata["intra_layers"],
    }


def loaded(model: Any, official: Fixture, group: str, stage: str) -> Any:
    model.load_state_dict(from_official(official.weights(group), stage))
    model.images.mean.zero_()
    model.images.std.fill_(1 / 255)
    return model.eval()


def adaptation(official: Fixture) -> CLIP4IDCAdaptation:
    model = CLIP4IDCAdaptation(**sizes(official), max_length=official.hyperparameters["context"])
    return loaded(model, official, "retrieval", "pretrain")


def captioner(official: Fixture) -> CLIP4IDC:
    metadata = official.hyperparameters
    model = CLIP4IDC(
        vocabulary_size=metadata["vocabulary"],
        **sizes(official),
        max_length=metadata["context"] + 1,
        width=metadata["captioner_width"],
        heads=metadata["captioner_heads"],
        ffn=metadata["captioner_ffn"],
        encoder_layers=metadata["captioner_layers"],
        decoder_layers=metadata["captioner_layers"],
        padding="released",
    )
    return loaded(model, official, "caption", "finetune")


@torch.no_grad()
def test_retrieval(official: Fixture) -> None:
    model, arrays = adaptation(official), official.arrays
    text, pair = model.words(arrays["tokens"]), model.encode_pairs(arrays["before"], arrays["after"])
    assert_close(text, arrays["text_embedding"][:, 0])
    assert_close(pair, arrays["pair_embedding"][:, 0])
    scale = model.logit_scale.exp()
    loss = pair_text_contrastive_loss(text, pair, scale).mean()
    assert_close(loss, arrays["adaptation_loss"])
    batch: Batch = {name: arrays[name] for name in ("before", "after", "tokens")}
    assert_close(model.loss(batch), arrays["adaptation_loss"])


@torch.no_grad()
def test_visual_tokens(official: Fixture) -> None:
    model, arrays = captioner(official), official.arrays
    views = model.encode_pixels(arrays["before"], arrays["after"])
    # The fixture's tokens are of the retrieval model, whose image tower has the same names and so the same weights.
    assert_close(views, arrays["visual_tokens"])


@torch.no_grad()
def test_words(official: Fixture) -> None:
    model, arrays = captioner(official), official.arrays
    shown = arrays["decoder_input"]
    memory = model.encode(arrays["before"], arrays["after"])
    assert torch.equal(shown != model.pad, arrays["decoder_mask"] == 1)
    logits = model.compute_logits(model.decode(shown, memory).last_block.hidden)
    assert_close(logits, arrays["decoder_logits"])
    # Input and target are one caption, shifted: the input's first word, then the targets.
    tokens = torch.cat([shown[:, :1], arrays["decoder_target"]], 1)
    assert torch.equal(tokens[:, :-1][shown != model.pad], shown[shown != model.pad])
    losses = model.validation_losses({**arrays, "tokens": tokens})["caption_loss"]
    assert_close(losses.mean(), arrays["caption_loss"])
