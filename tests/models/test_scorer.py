"""SCORER with CBR: how it begins, and what each loss compares."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.gradients import same_values_and_gradients
from tests.models.test_decoder import CLOSE, LENGTH, SIZES, batch_of, build, captions, gradients
from tests.models.tiny import maps
from torch import Tensor, nn

from diffcap.methods.scorer.model import CBR, SCORER, SCORERBlock
from diffcap.models.decoder import NULL

SUBTRACTION = {"difference": "subtraction", "cross_view_weight": 0.0}


def scorer(**options: Any) -> SCORER:
    return build(SCORER, **options)


def naive_matching(query: Tensor, key: Tensor) -> Tensor:
    """(A, N, D) and (B, M, D) to (A, B), eq. 2 and 3."""
    rows = []
    for one in query:
        rows.append([])
        for other in key:
            similarity = one @ other.T
            rows[-1].append((similarity.amax(1).mean() + similarity.amax(0).mean()) / 2)
        rows[-1] = torch.stack(rows[-1])
    return torch.stack(rows)


def test_the_decoder_begins_small_and_the_encoder_as_torch_does() -> None:
    torch.manual_seed(0)
    model = SCORER(**{**SIZES, "width": 64, "word_width": 48, "vocabulary_size": 90, "grid": (14, 14)})
    for name, module in model.decoder.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            assert module.weight.std().item() == pytest.approx(0.02, rel=0.05), name
        if isinstance(module, nn.Linear):
            assert (module.bias == 0).all(), name
        if isinstance(module, nn.LayerNorm):
            assert (module.weight == 1).all() and (module.bias == 0).all() and module.eps == 1e-6, name
    assert model.decoder.embedding.weight[NULL].std().item() == pytest.approx(0.02, rel=0.3)  # drawn, never trained
    other = SCORER(900, 5, grid=(40, 50), width=64, position_std=0.3, decoder_std=0.04)
    assert other.decoder.logit.weight.std().item() == pytest.approx(0.04, rel=0.06)
    for embedding, std in ((model.embedding, 1), (other.embedding, 0.3)):
        for table in (embedding.columns, embedding.rows):
            assert table.weight.std().item() == pytest.approx(std, rel=0.1)
    for layer in (model.embedding.projection, model.fusion[0], model.encoder[1].attention.qkv):
        bound = layer.weight.shape[1] ** -0.5
        assert 0.95 * bound < layer.weight.abs().max().item() <= bound and layer.bias.abs().max() > 0.8 * bound
    assert model.logit_scale is not None and model.cbr is not None
    assert model.logit_scale.item() == model.cbr.logit_scale.item() == 1


@pytest.mark.parametrize("groups", [1, 2])
def test_backward_reasoning_is_its_layers_one_after_the_other(groups: int) -> None:
    torch.manual_seed(0)
    cbr = CBR(8, 2)
    before, sentences = torch.randn(3, 5, 8, requires_grad=True), torch.randn(3 * groups, 8, requires_grad=True)
    joined = cbr.join(torch.cat([before.repeat(groups, 1, 1), sentences[:, None].expand(-1, 5, -1)], -1))
    expected, found = cbr.query(cbr.out(cbr.attention(joined)[0])), cbr(before, sentences)
    assert len(found) == groups and all(part.shape == before.shape for part in found)
    layers = [part for layer in (cbr.join, cbr.attention, cbr.out, cbr.query) for part in layer.parameters()]
    same_values_and_gradients(torch.cat(found), expected, [before, sentences, *layers])


def test_backward_reasoning_begins_as_torchs_attention_does() -> None:
    """It stays as it was drawn, so its scale is part of the method."""
    torch.manual_seed(0)
    ours, torchs = CBR(64, 8).attention, nn.MultiheadAttention(64, 8, bias=False)
    assert ours.qkv.weight.std().item() == pytest.approx(torchs.in_proj_weight.std().item(), rel=0.03)
    assert ours.out.weight.std().item() == pytest.approx(torchs.out_proj.weight.std().item(), rel=0.05)


@torch.no_grad()
@pytest.mark.parametrize("residual", ["gelu", "input"])
def test_the_blocks_last_residual(residual: Any) -> None:
    torch.manual_seed(0)
    block = SCORERBlock(8, 2, 0.0, residual)
    x, visual = torch.randn(2, 4, 8), torch.randn(2, 6, 8)
    out = block(x, block.cross.project_key_value(visual), None, ())

    def attend(query: Tensor, source: Tensor, layer: nn.Module) -> Tensor:
        """Torch's own, with a last layer that changes nothing: there is none in the block."""
        parts = layer.qkv.weight, layer.qkv.bias
        joined = (part.transpose(0, 1) for part in (query, source, source))
        return F.multi_head_attention_forward(
            *joined, 8, 2, *parts, None, None, False, 0.0, torch.eye(8), torch.zeros(8)
        )[0].transpose(0, 1)

    output = block.norm1(x + attend(x, x, block.self_attention))
    seen = block.norm2(output + attend(output, visual, block.cross))
    inner = seen @ block.inner.weight.T + block.inner.bias
    inner = inner * (1 + torch.erf(inner / 2**0.5)) / 2
    hidden = block.norm3(block.outer(inner) + (inner if residual == "gelu" else seen))
    for ours, theirs in ((out.after_self_attention, output), (out.after_cross_attention, seen), (out.hidden, hidden)):
        torch.testing.assert_close(ours, theirs, **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("mtm", ["collapsed", "per_head"])
def test_the_last_layers_queries_and_keys_are_matched(mtm: Any) -> None:
    model, (before, after) = scorer(mtm=mtm), maps(3)
    one, two = model.embedding(before), model.embedding(after)
    inside = model.encoder[0](one, two)  # what enters the second and last layer
    qkv = model.encoder[1].attention.qkv
    queries, keys = zip(*(qkv(part).split(16, -1)[:2] for part in (inside.before, inside.after)))
    encoded = model.run_encoder(one, two)
    assert encoded is not None
    found = model.cross_view_similarities(*model.merge_query_keys(encoded))
    heads = [slice(0, 16)] if mtm == "collapsed" else [slice(0, 8), slice(8, 16)]
    for similarity, query, key in ((found[0], queries[0], keys[1]), (found[1], queries[1], keys[0])):
        scores = torch.stack([naive_matching(query[..., h], key[..., h]) for h in heads]).mean(0)
        torch.testing.assert_close(similarity, math.exp(-0.5) * scores, **CLOSE)
    assert not torch.allclose(found[0], found[1].T, atol=0.05)


def test_frozen_backward_reasoning_teaches_what_it_is_given() -> None:
    found = {}
    for trainable in (False, True):
        model = scorer(cbr_trainable=trainable, cbr_weight=2.0)
        assert model.cbr is not None
        assert all(part.requires_grad == trainable for part in model.cbr.parameters())
        found[trainable] = gradients(model, model.loss(batch_of([3, 8, 5]))["loss"])
    names = {f"cbr.{name}" for name, _ in scorer().cbr.named_parameters()}
    assert found[True].keys() - found[False].keys() == names
    assert all(found[True][name].abs().max() > 1e-6 for name in names)
    for name, value in found[False].items():
        torch.testing.assert_close(value, found[True][name], msg=name)


@torch.no_grad()
def test_only_the_training_bounds_the_scale() -> None:
    model, batch, limit = scorer(), batch_of([3, 8, 5]), math.log(100)
    assert model.logit_scale is not None
    for training, start, end in ((False, 9.0, 9.0), (True, 9.0, limit), (True, -3.0, -3.0)):
        model.logit_scale.fill_(start)
        model.train(training).loss(batch)
        assert model.logit_scale.item() == pytest.approx(end)


@torch.no_grad()
def test_subtraction_is_the_papers_baseline() -> None:
    model, (before, after) = scorer(**SUBTRACTION), maps(2)
    one, two = model.embedding(before), model.embedding(after)
    expected = ((one - two) @ model.fusion[0].weight.T + model.fusion[0].bias).relu()
    torch.testing.assert_close(model.fuse(one, two, model.run_encoder(one, two)), expected, **CLOSE)
    assert len(model.encoder) == 0 and model.logit_scale is None and model.cbr is not None
    assert set(model.loss(batch_of([3, 8, 5]))) == {"loss", "caption_loss", "cbr_loss"}
    found = model.attention(before, after, captions([3, 8]))
    assert found.alignment is None and torch.equal(found.before, found.after)
    torch.testing.assert_close(found.before.sum((2, 3)), torch.ones(2, LENGTH))
    with pytest.raises(ValueError, match="subtraction has no cross-view contrast; set cross_view_weight to 0"):
        SCORER(**SIZES, difference="subtraction")
