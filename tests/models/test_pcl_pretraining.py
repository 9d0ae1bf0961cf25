"""IDC-PCL's pre-training on single images and on labelled pairs of images."""

from typing import Any

import pytest
import torch
from tests.models.test_pcl import masked_batch
from tests.models.tiny import captions, maps, pretraining
from torch import Tensor

from diffcap.data.masking import IGNORED
from diffcap.methods.pcl.losses import masked_visual_nce
from diffcap.methods.pcl.model import FIRST_CLS, FIRST_IMAGE, SECOND_CLS, SECOND_IMAGE, TEXT_CLS
from diffcap.methods.pcl.pretraining_model import PCLPretraining

CLOSE: dict[str, Any] = {"atol": 1e-5, "rtol": 1e-5}
PATCHES = 6


def single_batch() -> dict[str, Tensor]:
    batch = masked_batch(9)
    del batch["after"], batch["is_change"]
    hide = torch.zeros(3, PATCHES, dtype=torch.bool)
    hide[0, 2] = hide[1, 5] = hide[2, 0] = hide[2, 4] = True
    choices = torch.stack([captions([5, 3, 6], 9, seed) for seed in (2, 3, 4)])
    return {**batch, "visual_mask": hide, "fda_captions": choices}


def padded(model: PCLPretraining, image: Tensor, tokens: Tensor, padding: Tensor) -> Tensor:
    """The paper's form word for word: a second image that is padding, masked out of attention in every encoder."""
    trunk, rows = model.trunk, len(image)
    seen = torch.ones(rows, 1, 1, 1 + PATCHES, dtype=torch.bool)
    hidden = seen.clone()
    hidden[..., 1:] = False
    first = torch.cat([trunk.embed_cls(rows, FIRST_CLS), trunk.embed_patches(image, FIRST_IMAGE)], 1)
    second = torch.cat([trunk.embed_cls(rows, SECOND_CLS), trunk.embed_patches(padding, SECOND_IMAGE)], 1)
    both = [trunk.single_encoder(x, mask)[0] for x, mask in ((first, seen), (second, hidden))]
    visual = trunk.pair_encoder(torch.cat(both, 1), torch.cat([seen, hidden], -1))[0]
    x = torch.cat([visual, trunk.embed_cls(rows, TEXT_CLS), trunk.embed_text(tokens)], 1)
    text = torch.ones(rows, 1, 1, 1 + tokens.shape[1], dtype=torch.bool)
    return trunk.cross_encoder(x, torch.cat([seen, hidden, text], -1))[0]


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"single_layers": 2}, {"pair_layers": 0}], ids=str)
def test_the_masked_form_is_attention_that_never_sees_the_padding(options: dict[str, Any]) -> None:
    """Whatever the padding holds: mlm, mvcl and fda come out as with an explicit mask."""
    model, batch = pretraining(single_image="masked", **options), single_batch()
    for padding in (torch.zeros_like(batch["before"]), torch.randn_like(batch["before"])):
        hidden = padded(model, batch["before"], batch["mlm_tokens"], padding)[:, 3 + 2 * PATCHES :]
        chosen = batch["mlm_labels"] != IGNORED
        torch.testing.assert_close(model.mlm_logits(batch), model.trunk.output_layer(hidden[chosen]), **CLOSE)
        hide, image = batch["visual_mask"], batch["before"]
        shown = image * ~hide.unflatten(1, image.shape[2:])[:, None]
        hidden = padded(model, shown, batch["tokens"], padding)[:, 1 : 1 + PATCHES]
        regressed, original = model.regress(hidden, model.trunk.image_projection.weight), image.flatten(2).mT
        expected = masked_visual_nce(regressed[hide], original[hide], regressed[~hide])
        torch.testing.assert_close(model.mvcl(batch), expected, **CLOSE)
        for row in range(3):
            images = batch["before"][row : row + 1].expand(3, -1, -1, -1)
            hidden = padded(model, images, batch["fda_captions"][row], padding)
            pair = (hidden[:, 0] + hidden[:, 1 + PATCHES]) / 2
            expected = torch.cosine_similarity(pair, hidden[:, 2 + 2 * PATCHES], -1)
            torch.testing.assert_close(model.fda_similarity(batch)[row], expected, **CLOSE)


def fgvc_batch() -> dict[str, Tensor]:
    before, after = maps(3)
    classes = {"class_before": torch.tensor([0, 3, 2]), "class_after": torch.tensor([0, 1, 2])}
    return {"before": before, "after": after, **classes}


def test_every_parameter_of_the_visual_side_learns_from_classes() -> None:
    model = pretraining(classes=4)
    model.loss("fgvc", fgvc_batch())["loss"].backward()
    moved = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    for part in ("classifier", "matcher", "trunk.single_encoder", "trunk.pair_encoder", "trunk.image_projection"):
        assert any(name.startswith(part) for name in moved), part
    assert not any(name.startswith(("trunk.cross_encoder", "trunk.output_layer", "regress")) for name in moved)


@torch.no_grad()
def test_parts_of_the_loss_on_classes_can_be_chosen() -> None:
    model, batch = pretraining(classes=4), fgvc_batch()
    parts = model.loss("fgvc", batch)
    torch.testing.assert_close(parts["loss"], sum(parts[name] for name in ("classification", "matching", "contrast")))
    model.fgvc_losses = ["matching", "contrast"]
    torch.testing.assert_close(model.loss("fgvc", batch)["loss"], parts["matching"] + parts["contrast"])
