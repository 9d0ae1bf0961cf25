"""What the interface promises of every captioner: losses, memory, words step by step, attention maps, state, two processes."""

import inspect
import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tests.losses.ranks import on_two_ranks
from tests.models import test_clip4idc as clip
from tests.models import test_decoder as grid
from tests.models import test_remote_sensing as remote
from tests.models import tiny
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from diffcap.data.masking import IGNORED
from diffcap.losses.gather import rank
from diffcap.methods.dirl import DIRL
from diffcap.methods.pcl.model import MASK
from diffcap.methods.scorer.model import SCORER
from diffcap.models.captioner import Batch, Captioner
from diffcap.models.generation import beam_search, greedy, sample_from

PAIRS, LENGTH = 6, 9
LENGTHS = [2, 7, 4, 5, 3, 6]
CLOSE: dict[str, Any] = {"atol": 2e-5, "rtol": 1e-4}
RESNET: dict[str, Any] = {"backbone": "resnet18", "feature_channels": 3, "grid": (64, 32)}
CASES: dict[str, dict[str, Any]] = {
    "pcl": {},
    "pcl, text class token": {"text_cls": True},
    "pcl, no pair encoder": {"pair_layers": 0},
    "pcl, deeper": {"single_layers": 2, "cross_layers": 3, "image_activation": "linear"},
    "pcl, all positions": {"objective": "all_positions", "distractor_judging": False},
    "scorer": {},
    "scorer, paper": {"mtm": "per_head", "cbr_trainable": True, "cbr_weight": 0.2, "heads": 4},
    "scorer, one block": {"decoder_ffn_residual": "input", "decoder_layers": 1},
    "scorer, subtraction": {"difference": "subtraction", "cross_view_weight": 0.0},
    "scorer, other sizes": {"coordinates": False, "width": 24, "heads": 3, "grid": (4, 1)},
    "dirl": {"decorrelation_weight": 0.05},
    "dirl, paper": {"ccr_form": "two_way", "ccr_mask_padding": True, "decoder_variant": "ln_xavier"},
    "dirl, other sizes": {"coordinates": False, "width": 24, "heads": 3, "grid": (4, 1), "decoder_layers": 3},
    **{f"clip4idc, {name}": options for name, options in clip.VARIANTS.items()},
    "rsiccformer": {},
    "rsiccformer, two blocks": {"decoder_layers": 2},
    "rsiccformer, resnet": {**RESNET, "pool": (2, 1), "trained_layers": ("layer3",)},
    "chg2cap": {},
    "chg2cap, two blocks": {"decoder_layers": 2},
    "chg2cap, resnet": RESNET,
}
HEAD: dict[str, Any] = {"change_weight": 0.5, "change_types": ("add", "drop")}
CASES |= {f"{name}, change head": {**CASES[name], **HEAD} for name in ("scorer", "dirl", "rsiccformer", "chg2cap")}
CASES["clip4idc, change head"] = {**CASES["clip4idc, released"], **HEAD}
MARKS = {name: [pytest.mark.slow] if "resnet" in name else [] for name in CASES}
EVERY = pytest.mark.parametrize("name", [pytest.param(name, marks=marks) for name, marks in MARKS.items()])
OUTPUT_BIAS = {"pcl": "trunk.output_layer.bias", "clip4idc": "word_bias"}
RANKS = [name for name in CASES if "resnet" not in name]


class Case(NamedTuple):
    """A small captioner in evaluation mode, pairs for it, and captions of several lengths."""

    model: Captioner
    pair: tuple[Tensor, Tensor]
    tokens: Tensor


def case(name: str, seed: int = 1, **more: Any) -> Case:
    """Weights, images and captions follow from the arguments alone; `more`: of the captioner's constructor."""
    method, options, pairs, lengths = name.partition(",")[0], {**CASES[name], **more}, PAIRS, LENGTHS
    if method == "pcl":
        return Case(tiny.captioner(**options), tiny.maps(pairs, seed=seed), tiny.captions(lengths, LENGTH, seed))
    if method in ("scorer", "dirl"):
        shape = options.get("grid", (2, 3))
        model = grid.build(SCORER if method == "scorer" else DIRL, **options)
        return Case(model, tiny.maps(pairs, shape, seed=seed), grid.captions(lengths, LENGTH, seed))
    if method == "clip4idc":
        images = clip.pixels(pairs, seed=seed), clip.pixels(pairs, seed=seed + 9)
        model = clip.build(**options)
        return Case(model, images, clip.captions(lengths, LENGTH, model.pad, seed))
    model = remote.build(method, **options)
    images = remote.pixels(pairs, (64, 32), seed) if "resnet" in name else remote.maps(pairs, seed=seed)
    return Case(model, images, remote.captions(model, lengths)[:, :LENGTH])


def batch_of(name: str, streams: int = 1) -> Batch:
    """A training batch; with two streams, the second one has other after images and captions."""
    parts = [case(name, seed=1 + stream) for stream in range(streams)]
    tokens = torch.cat([part.tokens for part in parts])
    masked, labels = tokens.clone(), torch.full_like(tokens, IGNORED)
    masked[:, 2], labels[:, 2] = MASK, tokens[:, 2]
    return {
        "before": parts[0].pair[0],
        "after": torch.cat([part.pair[1] for part in parts]),
        "tokens": tokens,
        "mlm_tokens": masked,
        "mlm_labels": labels,
        "is_change": torch.arange(len(tokens)) % 2,
        "change_type": torch.arange(len(tokens)) % 3 - 1,
    }


def closing(model: Captioner, pair: tuple[Tensor, Tensor], method: str) -> Captioner:
    """Make a caption end about as likely as one of three words: by its end, and by padding where that ends one."""
    scores = model.get_parameter(OUTPUT_BIAS.get(method, "decoder.logit.bias"))
    with torch.no_grad():
        logits = model.step(torch.full((len(pair[0]),), model.bos_id), model.encode(*pair), None)[0]
        ends = [model.eos_id] if model.extra_eos_id is None else [model.eos_id, model.extra_eos_id]
        rest = logits[:, [number for number in range(logits.shape[1]) if number not in ends]].logsumexp(1)
        for token in ends:
            scores[token] += (rest - logits[:, token]).mean() - 1.0
    return model


def rows_of(pair: tuple[Tensor, Tensor], rows: slice) -> tuple[Tensor, Tensor]:
    return pair[0][rows], pair[1][rows]


@EVERY
@pytest.mark.parametrize("streams", [1, 2])
def test_losses_are_finite_scalars_and_reach_every_trained_parameter(name: str, streams: int) -> None:
    model, batch = case(name).model, batch_of(name, streams)
    parts = model.loss(batch)
    assert all(value.ndim == 0 and value.isfinite() for value in parts.values())
    parts["loss"].backward()
    trained = {key: part.grad for key, part in model.named_parameters() if part.requires_grad}
    assert not [key for key, gradient in trained.items() if gradient is None]  # torch's DDP would wait for them
    idle = [key for key, gradient in trained.items() if not gradient.any()]
    assert "resnet" in name or not idle  # few pixels leave a position or two, and nothing to attend to


@pytest.mark.parametrize("name", ["pcl", "scorer", "dirl", "clip4idc, released", "rsiccformer", "chg2cap"])
@torch.no_grad()
def test_dropout_is_of_training_alone(name: str) -> None:
    model, batch = case(name, dropout=0.4).model, batch_of(name)
    assert torch.equal(model.loss(batch)["loss"], model.loss(batch)["loss"])
    model.train()
    assert not torch.equal(model.loss(batch)["loss"], model.loss(batch)["loss"])


@EVERY
@torch.no_grad()
def test_validation_losses_have_one_value_for_each_word_or_pair(name: str) -> None:
    model, batch = case(name).model, batch_of(name)
    words = int(model.caption_mask(batch["tokens"]).sum())
    for values in model.validation_losses(batch).values():
        assert values.ndim == 1 and len(values) in (words, PAIRS) and (values >= 0).all()


@EVERY
@torch.no_grad()
def test_a_pair_is_encoded_alike_in_any_batch_and_may_share_its_before_image(name: str) -> None:
    model, (before, after), _ = case(name)
    whole = model.encode(before, after)
    assert all(len(leaf) == PAIRS for leaf in tree_leaves(whole))
    assert max(leaf.float().std(0).max() for leaf in tree_leaves(whole)) > 1e-3  # pairs differ
    alone = model.encode(before[2:3], after[2:3])
    tree_map(lambda one, other: torch.testing.assert_close(one, other[2:3], **CLOSE), alone, whole)
    shared = model.encode(before[:3], after)
    apart = model.encode(before[:3].repeat(2, 1, 1, 1), after)
    tree_map(lambda one, other: torch.testing.assert_close(one, other, **CLOSE), shared, apart)


@EVERY
def test_a_step_gives_the_logits_of_one_pass(name: str) -> None:
    model, pair, tokens = case(name)
    memory = model.encode(*pair)
    whole = model.teacher_forced_logits(tokens, memory)
    assert whole.shape[:2] == (PAIRS, LENGTH - 1) and whole.requires_grad
    assert whole[whole.isfinite()].std() > 0.1
    cache, within = None, model.caption_mask(tokens)
    for position in range(LENGTH - 1):
        with torch.no_grad():
            logits, cache = model.step(tokens[:, position], memory, cache)
        torch.testing.assert_close(whole[within[:, position], position], logits[within[:, position]], **CLOSE)


@EVERY
@torch.no_grad()
def test_captions_are_the_same_in_any_batch(name: str) -> None:
    model, pair, _ = case(name)
    closing(model, pair, name.partition(",")[0])
    memory = model.encode(*pair)
    found = {
        "greedy": greedy(model, memory, LENGTH),
        "beams": beam_search(model, memory, LENGTH, beams=3)[:, 0],
        "penalty": beam_search(model, memory, LENGTH, beams=3, length_penalty=1.0)[:, 0],
    }
    assert torch.equal(beam_search(model, memory, LENGTH, beams=1)[:, 0], found["greedy"])
    draws = torch.rand(PAIRS, LENGTH - 1, generator=torch.Generator().manual_seed(0))
    found["drawn"] = sample_from(model, memory, draws)
    for tokens in found.values():
        assert (tokens[:, 0] == model.bos_id).all() and tokens.shape[1] <= LENGTH
        behind = ~model.caption_mask(tokens)
        assert (tokens[:, 1:][behind] == model.eos_id).all()
    for row in range(PAIRS):
        memory = model.encode(*rows_of(pair, slice(row, row + 1)))
        alone = {
            "greedy": greedy(model, memory, LENGTH),
            "beams": beam_search(model, memory, LENGTH, beams=3)[:, 0],
            "penalty": beam_search(model, memory, LENGTH, beams=3, length_penalty=1.0)[:, 0],
            "drawn": sample_from(model, memory, draws[row : row + 1]),
        }
        for way, tokens in alone.items():
            length = tokens.shape[1]
            assert torch.equal(tokens[0], found[way][row, :length]), (way, row)
            assert (found[way][row, length:] == model.eos_id).all(), (way, row)


@EVERY
@torch.no_grad()
def test_attention_maps_are_distributions_over_the_patches(name: str) -> None:
    model, pair, tokens = case(name)
    found = model.attention(*pair, tokens)
    assert found.before.shape == found.after.shape and found.before.shape[:2] == (PAIRS, LENGTH)
    assert (found.before >= 0).all() and (found.after >= 0).all()
    sums = found.before.sum((2, 3)) + found.after.sum((2, 3))
    torch.testing.assert_close(sums, torch.full_like(sums, 2.0))
    if found.alignment is not None:
        places = found.before.shape[2] * found.before.shape[3]
        assert found.alignment.shape == (PAIRS, places, places) and (found.alignment >= 0).all()
        torch.testing.assert_close(found.alignment.sum(-1), torch.ones(PAIRS, places))


@EVERY
@torch.no_grad()
def test_hyperparameters_and_state_dict_build_the_same_captioner(name: str) -> None:
    model, batch = case(name).model, batch_of(name)
    hyperparameters = json.loads(json.dumps(model.hyperparameters))
    named = [key for key, part in inspect.signature(type(model)).parameters.items() if part.kind != part.VAR_KEYWORD]
    assert set(named) <= set(hyperparameters)
    twin = type(model)(**hyperparameters)
    twin.load_state_dict(model.state_dict())
    for part, value in model.loss(batch).items():
        assert torch.equal(twin.eval().loss(batch)[part], value), part


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("pcl")])
def test_images_of_another_shape_are_refused(name: str) -> None:
    model, (before, _), _ = case(name)
    for image in (before[:, :, :, 1:], before[:, :, 1:], before[:, 1:]):
        with pytest.raises(ValueError, match="the model was built for"):
            model.encode(image, image)


def learn(name: str, batch: Batch) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The losses and the gradients of this process."""
    model = case(name).model
    parts = model.loss(batch)
    parts["loss"].backward()
    gradients = {key: part.grad for key, part in model.named_parameters() if part.grad is not None}
    return {key: value.detach() for key, value in parts.items()}, gradients


def learn_share(batches: dict[tuple[str, int], Batch]) -> dict[tuple[str, int], Any]:
    """What a rank learns from its pairs, of every stream: the first rank has four, the second two."""
    pairs = slice(0, 4) if rank() == 0 else slice(4, None)

    def share(batch: Batch) -> Batch:
        return {key: torch.cat([part[pairs] for part in rows.split(PAIRS)]) for key, rows in batch.items()}

    return {(name, streams): learn(name, share(batch)) for (name, streams), batch in batches.items()}


@pytest.mark.slow
def test_two_processes_give_the_loss_and_the_gradients_of_one(tmp_path: Path) -> None:
    """The mean over the ranks, which DDP takes, is that of the whole batch."""
    batches = {(name, streams): batch_of(name, streams) for name in RANKS for streams in (1, 2)}
    ranks = on_two_ranks(learn_share, batches, tmp_path)
    for (name, streams), batch in batches.items():
        losses, gradients = learn(name, batch)
        where = f"{name}, {streams} streams: "
        (one, one_gradients), (other, other_gradients) = (part[name, streams] for part in ranks)
        for part, value in losses.items():
            torch.testing.assert_close((one[part] + other[part]) / 2, value, **CLOSE, msg=where + part)
        assert gradients.keys() == one_gradients.keys() == other_gradients.keys()
        for part, value in gradients.items():
            mean = (one_gradients[part] + other_gradients[part]) / 2
            size = max(value.abs().max().item(), 1.0)
            torch.testing.assert_close(mean, value, atol=1e-5 * size, rtol=1e-4, msg=where + part)
