"""IDC-PCL: the losses against plain passes, padding, and the options; test_contract.py has the cache."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.models.tiny import SIZES, captioner, captions, maps, pretraining
from torch import Tensor, nn

from diffcap.data.masking import IGNORED
from diffcap.methods.clip4idc.model import CLIP4IDC
from diffcap.methods.dirl import DIRL
from diffcap.methods.pcl.losses import masked_visual_nce
from diffcap.methods.pcl.model import BOS, MASK, PAD, PCL, TEXT_CLS
from diffcap.methods.scorer.model import SCORER
from diffcap.utils.errors import DiffcapError

CLOSE: dict[str, Any] = {"atol": 1e-5, "rtol": 1e-5}


def without_cache(model: PCL, before: Tensor, after: Tensor, words: Tensor) -> Tensor:
    """Logits of the position after `words` (B, t): visual tokens, words and [MASK] through one masked encoder pass."""
    visual = model.trunk.encode_images(before, after)[1]
    if model.text_cls:
        visual = torch.cat([visual, model.trunk.embed_cls(len(visual), 5)], 1)
    text = model.trunk.embed_text(torch.cat([words, torch.full((len(words), 1), MASK)], 1))
    seen, length = visual.shape[1], text.shape[1]
    mask = torch.zeros(seen + length, seen + length, dtype=torch.bool)
    mask[:, :seen] = True
    for row in range(length):
        mask[seen + row, seen : seen + row + 1] = True
    hidden = model.trunk.cross_encoder(torch.cat([visual, text], 1), mask)[0]
    return model.trunk.output_layer(hidden[:, -1])


def masked_batch(padded: int, pairs: int = 3) -> dict[str, Tensor]:
    tokens = captions([5, 3, 6], padded)[:pairs]
    labels = torch.full_like(tokens, IGNORED)
    hidden = tokens.clone()
    for row, place in enumerate((2, 3, 6)[:pairs]):  # 3 is an EOS-side word, 6 the last word
        labels[row, place], hidden[row, place] = tokens[row, place], MASK
    before, after = maps(pairs)
    masked = {"mlm_tokens": hidden, "mlm_labels": labels}
    return {"before": before, "after": after, "tokens": tokens, **masked, "is_change": torch.tensor([1, 0, 1])[:pairs]}


@pytest.mark.parametrize("objective", ["masked", "all_positions"])
def test_trimming_changes_nothing_in_fine_tuning(objective: str) -> None:
    model = captioner(objective=objective, dropout=0.0)
    results = []
    for padded in (8, 15):
        model.zero_grad()
        parts = model.loss(masked_batch(padded))
        parts["loss"].backward()
        results.append((parts, [parameter.grad.clone() for parameter in model.parameters()]))
    (short, short_gradients), (long, long_gradients) = results
    for name in ("loss", "word_loss", "distractor_loss"):
        torch.testing.assert_close(short[name], long[name], **CLOSE)
    for a, b in zip(short_gradients, long_gradients):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_the_pad_mask_makes_trimming_exact_in_pre_training_and_only_it() -> None:
    for pad_mask in (True, False):
        model = pretraining(pad_mask=pad_mask)
        mlm = [model.mlm(masked_batch(padded)) for padded in (8, 15)]
        before, after = maps(2)
        fda = []
        for padded in (8, 15):
            choices = torch.stack([captions([5, 3, 6], padded, seed) for seed in (2, 3)])
            fda.append(model.fda_similarity({"before": before, "after": after, "fda_captions": choices}))
        mvcl = [model.mvcl({**masked_batch(padded), "visual_mask": visual_mask()}) for padded in (8, 15)]
        for short, long in (mlm, fda, mvcl):
            assert torch.allclose(short, long, atol=1e-5) == pad_mask


def assert_same_losses_and_gradients(model: nn.Module, ours: Tensor, plain: Tensor) -> None:
    torch.testing.assert_close(ours, plain, **CLOSE)
    weights = torch.arange(1.0, 1 + len(ours))  # a different factor of each loss
    parameters, options = list(model.parameters()), {"retain_graph": True, "materialize_grads": True}
    gradients = [torch.autograd.grad((losses * weights).sum(), parameters, **options) for losses in (ours, plain)]
    for a, b in zip(*gradients):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("options", [{}, {"pad_mask": True}, {"cross_layers": 1}, {"cross_layers": 3}], ids=str)
@pytest.mark.parametrize("images", [1, 2])
def test_the_tasks_equal_a_plain_pass_of_all_positions(images: int, options: dict[str, Any]) -> None:
    """MLM, MVCL and FDA compute only the positions that they read, and what a pair's captions share only once."""
    model = pretraining(**options)
    trunk, batch = model.trunk, masked_batch(8)
    if images == 1:
        del batch["after"]
    maps = [batch[name] for name in ("before", "after")[:images]]
    cls = [0, 7]  # of the images, 6 patches each
    patches = [*range(1, 7), *range(8, 14)][: 6 * images]

    def plain(maps: list[Tensor], tokens: Tensor) -> Tensor:
        visual = trunk.encode_images(*maps)[1] if images == 2 else trunk.encode_one_image(*maps)
        x = torch.cat([visual, trunk.embed_cls(len(tokens), TEXT_CLS), trunk.embed_text(tokens)], 1)
        mask = torch.cat([torch.ones(len(tokens), x.shape[1] - tokens.shape[1], dtype=torch.bool), tokens != PAD], 1)
        return trunk.cross_encoder(x, mask[:, None, None] if model.pad_mask else None)[0]

    labels = batch["mlm_labels"]
    labels[0, 1], labels[0, 4] = 7, 9  # so that rows have different numbers of masked words
    words = trunk.output_layer(plain(maps, batch["mlm_tokens"])[:, -8:][labels != IGNORED])
    masked_words = nn.functional.cross_entropy(words, labels[labels != IGNORED], reduction="none")
    assert_same_losses_and_gradients(model, model.mlm(batch), masked_words)

    batch["visual_mask"] = is_masked = visual_mask()[:, :6].logical_or(visual_mask()[:, 6:]).repeat(1, images)
    original = torch.cat([image.flatten(2).transpose(1, 2) for image in maps], 1)
    shown = [
        image * ~mask.unflatten(1, image.shape[2:])[:, None] for image, mask in zip(maps, is_masked.chunk(images, 1))
    ]
    regressed = model.regress(plain(shown, batch["tokens"])[:, patches], trunk.image_projection.weight)
    patch_losses = masked_visual_nce(regressed[is_masked], original[is_masked], regressed[~is_masked])
    assert_same_losses_and_gradients(model, model.mvcl(batch), patch_losses)

    batch["fda_captions"] = choices = torch.stack([captions([5, 3, 6], 8, seed) for seed in (2, 3, 4)])
    hidden = plain([image.repeat_interleave(3, 0) for image in maps], choices.flatten(0, 1))
    pairs = hidden[:, cls].mean(1)
    cosines = torch.cosine_similarity(pairs, hidden[:, -9], -1).view(3, 3)
    assert_same_losses_and_gradients(model, model.fda(batch), cosines.logsumexp(1) - cosines[:, 0])


@pytest.mark.parametrize("text_cls", [False, True])
@pytest.mark.parametrize("objective", ["masked", "all_positions"])
def test_fine_tuning_equals_a_plain_pass_of_all_positions(objective: str, text_cls: bool) -> None:
    model, batch = captioner(dropout=0.0, objective=objective, text_cls=text_cls), masked_batch(8)
    trunk, tokens, labels = model.trunk, batch["tokens"], batch["mlm_labels"]
    labels[0, 1], labels[0, 4] = 7, 9
    visual = trunk.encode_images(batch["before"], batch["after"])[1]
    if model.text_cls:
        visual = torch.cat([visual, trunk.embed_cls(3, TEXT_CLS)], 1)
    final, memory = trunk.cross_encoder(visual)
    if model.objective == "masked":
        causal = torch.ones(8, visual.shape[1] + 8, dtype=torch.bool).tril(visual.shape[1])
        hidden = trunk.cross_encoder(trunk.embed_text(batch["mlm_tokens"]), causal, [(part,) for part in memory])[0]
        logits, target = trunk.output_layer(hidden[labels != IGNORED]), labels[labels != IGNORED]
    else:
        before, after = batch["before"], batch["after"]
        rows = [without_cache(model, before, after, tokens[:, : last + 1]) for last in range(7)]
        kept = tokens[:, 1:] != PAD
        logits, target = torch.stack(rows, 1)[kept], tokens[:, 1:][kept]
    words = nn.functional.cross_entropy(logits, target, reduction="none")
    judged = model.distractor_head(torch.cat([final[:, 0], final[:, 7]], 1))
    judgements = nn.functional.cross_entropy(judged, batch["is_change"], reduction="none")
    ours = model.validation_losses(batch)
    assert_same_losses_and_gradients(model, ours["word_loss"], words)
    assert_same_losses_and_gradients(model, model.validation_losses(batch)["distractor_loss"], judgements)


def visual_mask() -> Tensor:
    hide = torch.zeros(3, 12, dtype=torch.bool)
    hide[0, 2] = hide[1, 7] = hide[2, 11] = hide[2, 6] = True
    return hide


@torch.no_grad()
def test_the_loss_is_sums_of_words_and_of_judgements() -> None:
    batch = masked_batch(8)
    model = captioner(distractor_weight=3.0)
    seen, images = model.encode_pair(batch["before"], batch["after"])
    words, labels = model.masked_logits(seen, batch), batch["mlm_labels"]
    expected, judged = 0.0, 0.0
    for row, label in zip(words.log_softmax(-1), labels[labels != IGNORED]):
        expected -= row[label].item()
    for row, label in zip(model.distractor_head(images.flatten(1)).log_softmax(-1), batch["is_change"]):
        judged -= row[label].item()
    parts = model.loss(batch)
    assert parts["loss"].item() == pytest.approx(expected + 3 * judged, rel=1e-5)
    assert parts["word_loss"].item() == pytest.approx(expected / 3, rel=1e-5)
    assert parts["distractor_loss"].item() == pytest.approx(judged / 3, rel=1e-5)
    alone = captioner(distractor_judging=False).loss(batch)
    assert set(alone) == {"loss", "word_loss"} and alone["loss"].item() == pytest.approx(expected, rel=1e-5)


@torch.no_grad()
@pytest.mark.parametrize(
    ("options", "changed"),
    [({"mvcl_negatives": "features"}, [False, True, False]), ({"temperature": 0.1}, [False, True, True])],
)
def test_options_of_pre_training_change_their_losses(options: dict[str, Any], changed: list[bool]) -> None:
    batch = {**masked_batch(8), "visual_mask": visual_mask()}
    batch["fda_captions"] = torch.stack([captions([5, 3, 6], 8, seed) for seed in (2, 3, 4)])
    released, other = (
        [model.loss(task, batch)["loss"].item() for task in ("mlm", "mvcl", "fda")]
        for model in (pretraining(), pretraining(**options))
    )
    assert [a != pytest.approx(b, abs=1e-6) for a, b in zip(released, other)] == changed


def test_too_many_positions_say_which_option_to_raise() -> None:
    with pytest.raises(DiffcapError, match=r"42 positions, but model\.captioner\.init_args\.positions is .*; raise it"):
        captioner().encode(*maps(1, (7, 6)))
    batch = {**dict(zip(("before", "after"), maps(1))), "tokens": captions([7], 9), "is_change": torch.ones(1)}
    with pytest.raises(DiffcapError, match=r"needs 9 positions, but model\.captioner\.init_args\.positions is 8"):
        captioner(objective="all_positions", positions=8).loss(batch)
    assert captioner(objective="all_positions", positions=9).loss(batch)["loss"].isfinite()


@pytest.mark.parametrize(
    ("build", "name"),
    [
        (captioner, "objective"),
        (captioner, "image_activation"),
        (pretraining, "pair_init"),
        (pretraining, "single_image"),
        (lambda **options: SCORER(23, 5, grid=(2, 3), **options), "difference"),
        (lambda **options: DIRL(23, 5, grid=(2, 3), **options), "ccr_form"),
        (lambda **options: CLIP4IDC(23, **options), "decoder"),
    ],
)
def test_a_misspelt_choice_is_refused_with_the_choices(build: Callable[..., Any], name: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name} is 'maskd'; it must be one of '\w+', '\w+'$"):
        build(**{name: "maskd"})


@torch.no_grad()
def test_the_pair_encoder_may_begin_with_the_difference() -> None:
    """Equal queries and keys, values turned back by the output layer: what is alike in both images cancels out."""
    torch.manual_seed(0)
    plain, ours = (PCL(**{**SIZES, "pair_init": init}).trunk for init in ("random", "difference"))
    attention = ours.pair_encoder.layers[0].attention
    query, key, value = attention.qkv.weight.chunk(3)
    assert torch.equal(query, key) and not torch.equal(*plain.pair_encoder.layers[0].attention.qkv.weight.chunk(3)[:2])
    torch.testing.assert_close(value @ value.T, torch.eye(len(value)), **CLOSE)
    turned = (attention.out.weight @ value).diagonal()
    assert turned.mean().item() == pytest.approx(-1, abs=0.05)


def test_attention_is_where_the_mask_looks_as_each_word_is_said() -> None:
    """Recomputed word by word: the [MASK] behind the words so far, over everything it may see, patches kept."""
    model, (before, after) = captioner(), maps(2)
    tokens = torch.tensor([[BOS, 7, 9], [BOS, 8, 8]])
    found = model.attention(before, after, tokens)
    seen = model.encode(before, after)
    stack = model.trunk.cross_encoder
    for place in range(3):
        text = torch.cat([tokens[:, : place + 1], torch.full((2, 1), MASK)], 1)
        x = stack.norm(model.trunk.embed_text(text))
        mask = torch.ones(place + 2, seen[0][0].shape[2] + place + 2, dtype=torch.bool).tril(seen[0][0].shape[2])
        x, _ = stack.layers[0](x, mask, (seen[0],))
        block = stack.layers[1]
        query, key, _ = block.attention.project_qkv(block.attention_norm(x))
        attended = block.attention.mean_weights(query[:, :, -1:], torch.cat([seen[1][0], key], 2))[:, 0]
        patches = torch.cat([attended[:, 1:7], attended[:, 8:14]], 1)
        patches = 2 * patches / patches.sum(1, keepdim=True)
        torch.testing.assert_close(found.before[:, place].flatten(1), patches[:, :6])
        torch.testing.assert_close(found.after[:, place].flatten(1), patches[:, 6:])
    assert found.alignment is None
