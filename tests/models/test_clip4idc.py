"""CLIP4IDC's towers, captioner and baselines on small networks; the authors' numbers are in tests/parity."""

import zlib
from typing import Any

import pytest
import torch
from tests.gradients import same_values_and_gradients
from tests.models import tiny
from torch import Tensor

from diffcap.methods.clip4idc.model import CLIP4IDC, CLIP4IDCAdaptation
from diffcap.models.clip import PairTower, QuickGELU, TextTower, build_clip, clamp_logit_scale_

WORDS = 23
NETWORK: dict[str, Any] = {
    "embed_dim": 12,
    "quick_gelu": True,
    "vision_cfg": {"image_size": 16, "patch_size": 4, "width": 16, "head_width": 8, "layers": 4},
    "text_cfg": {"context_length": 14, "vocab_size": WORDS, "width": 12, "heads": 2, "layers": 2},
}
SIZES: dict[str, Any] = {"network": NETWORK, "image_size": (8, 12), "max_length": 10}
LAYERS = {"encoder_layers": 2, "decoder_layers": 2}
CAPTIONER: dict[str, Any] = {"width": 12, "heads": 2, "ffn": 20, "dropout": 0.0, **LAYERS}
VARIANTS: dict[str, dict[str, Any]] = {
    "released": {},
    "all see the last": {"layerwise_cross_attention": False},
    "wider": {"width": 16},
    "ft1": {"images": "apart", "decoder": "clip_text"},
    "ft2": {"images": "apart"},
    "no encoder": {"encoder_layers": 0, "layerwise_cross_attention": False},
    "padding": {"padding": "released"},
}
CLOSE: dict[str, Any] = {"atol": 1e-5, "rtol": 1e-4}


def build(**options: Any) -> CLIP4IDC:
    """A small captioner in evaluation mode whose weights all matter, those that begin at nothing too."""
    model = CLIP4IDC(WORDS, **{**SIZES, **CAPTIONER, **options})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            draws = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            values = torch.randn(parameter.shape, generator=draws)
            scale = 1.2 / parameter[0].numel() ** 0.5 if parameter.ndim >= 2 else 0.2
            parameter.copy_(values * scale + (parameter.ndim == 1 and "norm" in name and name.endswith("weight")))
    return model.eval()


def pixels(pairs: int, size: tuple[int, int] = (8, 12), seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (pairs, 3, *size), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def captions(lengths: list[int], padded: int, pad: int = WORDS, seed: int = 2) -> Tensor:
    return tiny.captions(lengths, padded, seed, (WORDS - 2, WORDS - 1, pad), range(1, WORDS - 2))


@torch.no_grad()
def test_intra_layers_see_one_image_and_inter_layers_both() -> None:
    clip = build_clip(NETWORK, (8, 12))
    tower = PairTower(clip, intra_layers=3).eval()
    before, after, other = (tower.normalize(pixels(2, seed=seed)) for seed in (0, 1, 2))
    alone = tower.encode_single(before)
    maps = tower.visual.forward_intermediates(before, indices=[2], intermediates_only=True)["image_intermediates"][0]
    torch.testing.assert_close(alone[:, 1:], maps.flatten(2).transpose(1, 2))  # open_clip's own way to block 2
    tokens = tower(before, after)
    assert tokens.shape == (2, 2 * (1 + 2 * 3), 12) and tower.grid == (2, 3)
    moved = (tower(before, other) - tokens).abs().amax(2)
    assert (moved > 1e-4).all()  # every token, those of the first image too


@torch.no_grad()
def test_apart_the_images_do_not_meet() -> None:
    tower = PairTower(build_clip(NETWORK, (8, 12)), joint=False).eval()
    before, after, other = (tower.normalize(pixels(2, seed=seed)) for seed in (0, 1, 2))
    tokens, changed = tower(before, after), tower(before, other)
    assert torch.equal(tokens[:, :7], changed[:, :7]) and not torch.allclose(tokens[:, 7:], changed[:, 7:])
    whole = tower.visual(before)  # CLIP's own vector of an image
    torch.testing.assert_close(tokens[:, 0] - tower.before_mark, whole)


@torch.no_grad()
@pytest.mark.parametrize("ends", [[3, 5], [8, 1]])
def test_a_sentence_is_read_at_its_end_whatever_pads_it(ends: list[int]) -> None:
    clip = build_clip(NETWORK)
    tower = TextTower(clip).eval()
    with_own, with_zeros = captions(ends, 12), captions(ends, 12, pad=0)
    text = tower(with_own)
    torch.testing.assert_close(text, tower(with_zeros))
    torch.testing.assert_close(text[0], tower(with_own[:1, : ends[0] + 2])[0])
    full = torch.zeros(2, NETWORK["text_cfg"]["context_length"], dtype=torch.long)
    full[:, :12] = with_zeros
    torch.testing.assert_close(text, clip.encode_text(full))  # type: ignore[operator]


@pytest.mark.parametrize("name", VARIANTS)
@torch.no_grad()
def test_maps_of_the_words(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Naively: the softmax of what the last cross-attention is given, class tokens left out."""
    model, tokens = build(**VARIANTS[name]), captions([4, 7], 10, pad=build(**VARIANTS[name]).pad)
    before, after = pixels(2, seed=1), pixels(2, seed=2)
    asked: list[tuple[Tensor, Tensor]] = []
    last = model.decoder[-1].cross
    last.qkv.weight[: last.width] *= 100  # so that it looks somewhere
    attend = last.attend
    monkeypatch.setattr(last, "attend", lambda query, seen: asked.append((query, seen[0])) or attend(query, seen))
    found = model.attention(before, after, tokens)
    assert found.before.shape == found.after.shape == (2, 10, 2, 3)
    query, key = asked[0]
    weights = torch.einsum("bhtd,bhsd->bhts", query, key).div(query.shape[3] ** 0.5).softmax(3).mean(1)  # (B, T, 14)
    patches = weights[..., [1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 12, 13]]
    expected = 2 * patches / patches.sum(2, keepdim=True)
    torch.testing.assert_close(torch.cat([found.before.flatten(2), found.after.flatten(2)], 2), expected)
    assert expected.std() > 0.02
    assert found.alignment is None


@pytest.mark.parametrize("name", VARIANTS)
def test_the_loss_is_the_mean_over_real_words_added_over_streams(name: str) -> None:
    model = build(**VARIANTS[name])
    before, after = pixels(2, seed=1), pixels(4, seed=2)
    tokens = captions([4, 7, 2, 5], 10, pad=model.pad)
    parts = model.loss({"before": before, "after": after, "tokens": tokens})
    expected = []
    for rows in (slice(0, 2), slice(2, 4)):
        memory = model.encode(before, after[rows])
        log = model.compute_logits(model.decode(tokens[rows], memory).last_block.hidden).log_softmax(-1)
        losses = [
            -log[pair, place, word].item()
            for pair, row in enumerate(tokens[rows].tolist())
            for place, word in enumerate(row[1:])
            if word != model.pad
        ]
        expected.append(sum(losses) / len(losses))
    assert parts["loss"].item() == pytest.approx(sum(expected), rel=1e-4)
    assert parts["distractor_caption_loss"].item() == pytest.approx(expected[1], rel=1e-4)


def test_recomputing_blocks_changes_neither_loss_nor_gradient() -> None:
    found = []
    batch = {"before": pixels(2), "after": pixels(2, seed=1), "tokens": captions([4, 2], 10)}
    for again in (False, True):
        model = build(checkpointing=again).train()
        parts = model.loss(batch)
        parts["loss"].backward()
        found.append([parts["loss"].detach(), *(p.grad for p in model.images.parameters() if p.grad is not None)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_what_learns_at_which_rate() -> None:
    assert not build().images.visual.conv1.weight.requires_grad and build().images.joint_positions.requires_grad
    assert all(part.requires_grad for part in build(freeze_embeddings=False).parameters())
    model = build(train_words=True)
    clip = {id(part) for part in model.pretrained_parameters()}
    assert id(model.words.token_embedding.weight) in clip and id(model.images.joint_positions) in clip
    assert id(model.word_bias) not in clip
    assert not build().words.token_embedding.weight.requires_grad
    ft1 = build(**VARIANTS["ft1"])
    names = {id(part): name for name, part in ft1.named_parameters()}
    trained = {names[id(part)] for part in ft1.pretrained_parameters()}
    assert {"decoder.1.self_attention.qkv.weight", "decoder.0.norm1.bias", "head_norm.weight"} <= trained
    assert not [name for name in trained if "cross" in name or name.startswith("encoder")]


def test_adaptation_learns_everything_and_keeps_its_scale() -> None:
    torch.manual_seed(0)
    model = CLIP4IDCAdaptation(NETWORK, (8, 12), freeze_embeddings=False, max_length=14)
    default = CLIP4IDCAdaptation(NETWORK, max_length=14)
    frozen = {name for name, part in default.named_parameters() if not part.requires_grad}
    assert len(frozen) == 7 and "words.token_embedding.weight" in frozen and "images.visual.conv1.weight" in frozen
    batch = {"before": pixels(4), "after": pixels(4, seed=1), "tokens": captions([3, 5, 2, 7], 10)}
    loss = model.loss(batch)
    loss.backward()
    assert 0.5 < loss.item() < 8 and all(part.grad is not None for part in model.parameters())
    with torch.no_grad():
        model.logit_scale.fill_(9.0)
    clamp_logit_scale_(model.logit_scale)
    assert model.logit_scale.exp().item() == pytest.approx(100, rel=1e-5)


@torch.no_grad()
def test_a_pair_may_begin_with_the_difference() -> None:
    """What stands alike in both images leaves its place; what one image alone has stays."""
    torch.manual_seed(0)
    tower = PairTower(build_clip(NETWORK, (8, 12)), intra_layers=2, pair_init="difference")
    block = tower.visual.transformer.resblocks[2]
    x = torch.nn.functional.layer_norm(torch.randn(1, 6, 16) * 3, (16,))
    pair = torch.cat([x, x], 1)
    pair[0, 4] = torch.nn.functional.layer_norm(torch.randn(16), (16,))  # another thing there before
    left = (pair + block.attn(pair, pair, pair, need_weights=False)[0])[0].norm(dim=1)
    assert left[[4, 10]].mean() > 1.5 * left[[0, 1, 2, 3, 5, 6, 7, 8, 9, 11]].mean()


def test_networks_that_do_not_fit_are_refused() -> None:
    network = build_clip(NETWORK)
    for action, sentence in (
        (lambda: build_clip("ViT-B-33"), "open_clip has no model 'ViT-B-33'"),
        (lambda: build_clip(NETWORK, (10, 12)), "patches of 4 pixels do not divide an image side of 10"),
        (lambda: build_clip("RN50"), r"RN50 has no .*; choose a ViT"),
        (lambda: PairTower(network, 0), "intra_layers is 0; the network has 4 blocks: give 1 to 3"),
        (lambda: PairTower(network, 4), "intra_layers is 4; the network has 4 blocks: give 1 to 3"),
        (lambda: build(max_length=16), "max_length 16 needs 15 text positions, CLIP has 14; lower it"),
        (lambda: CLIP4IDCAdaptation(NETWORK, max_length=15), "max_length 15 needs 15 text positions, CLIP has 14; low"),
        (lambda: build(encoder_layers=3), "layerwise_cross_attention needs as many encoder as decoder blocks, not 3"),
        (
            lambda: build().words(torch.zeros(1, 15).long()),
            "15 text positions are needed, CLIP has 14: lower max_length",
        ),
    ):
        with pytest.raises(ValueError, match=sentence):
            action()


def test_quick_gelu_is_that_of_open_clip() -> None:
    x = torch.linspace(-8, 8, 101, requires_grad=True)
    same_values_and_gradients(QuickGELU()(x), x * torch.sigmoid(1.702 * x), [x])
    assert sum(type(part) is QuickGELU for part in build_clip(NETWORK).modules()) == 4 + 2
