"""The change head: its losses against a naive loop, what it learns, and captioners with and without it."""

import itertools
import math
from typing import Any

import pytest
import torch
from tests.models.test_contract import CASES, HEAD, batch_of, case

from diffcap.models.change_head import UNKNOWN_TYPE, ChangeHead, change_loss, change_type_loss
from diffcap.models.generation import Ensemble

METHODS = [name.partition(",")[0] for name in CASES if "change head" in name]
WITHOUT = {name: "clip4idc, released" if name == "clip4idc" else name for name in METHODS}


def test_the_losses_are_those_of_a_naive_loop() -> None:
    torch.manual_seed(0)
    change, types = 3 * torch.randn(6), 3 * torch.randn(6, 3)
    is_change, known = (
        torch.tensor([1, 1, 1, 0, 0, 1]),
        torch.tensor([2, 0, UNKNOWN_TYPE, UNKNOWN_TYPE, UNKNOWN_TYPE, 1]),
    )
    for row, (found, found_type) in enumerate(zip(change_loss(change, is_change), change_type_loss(types, known))):
        probability = 1 / (1 + math.exp(-float(change[row])))
        assert float(found) == pytest.approx(-math.log(probability if is_change[row] else 1 - probability), rel=1e-5)
        powers = [math.exp(value) for value in types[row].tolist()]
        expected = 0.0 if known[row] == UNKNOWN_TYPE else -math.log(powers[int(known[row])] / sum(powers))
        assert float(found_type) == pytest.approx(expected, rel=1e-5)


def test_the_head_learns_a_change_that_one_token_shows_and_its_type() -> None:
    torch.manual_seed(1)
    is_change, types = torch.arange(64) % 2, torch.arange(64) // 2 % 2
    types[is_change == 0] = UNKNOWN_TYPE
    head = ChangeHead(8, ("add", "drop"), 1.0)
    optimizer = torch.optim.Adam(head.parameters(), 0.01)

    def draw() -> torch.Tensor:
        tokens = torch.randn(64, 20, 8)
        for row, place in itertools.product(range(64), [int(torch.randint(20, ()))]):
            tokens[row, place, types[row]] += 9 * is_change[row]
        return tokens

    for _ in range(150):
        optimizer.zero_grad()
        sum(values.mean() for values in head.losses(draw(), is_change, types).values()).backward()
        optimizer.step()
    change, kinds = head(draw())
    assert ((change > 0) == is_change.bool()).float().mean() > 0.95
    assert (kinds.argmax(1) == types)[is_change == 1].float().mean() > 0.95


@pytest.mark.parametrize("name", METHODS)
def test_a_captioner_without_the_head_is_the_same_but_for_its_estimate(name: str) -> None:
    """Names of weights, their initial values and the other losses do not depend on the head; a checkpoint may lack its arguments."""
    plain, head = case(WITHOUT[name]), case(f"{name}, change head")
    weights = {key: value for key, value in head.model.state_dict().items() if not key.startswith("change_head.")}
    assert plain.model.state_dict().keys() == weights.keys() < head.model.state_dict().keys()
    arguments: dict[str, Any] = {key: value for key, value in plain.model.hyperparameters.items() if key not in HEAD}
    old = type(plain.model)(**arguments).eval()
    old.load_state_dict(weights)
    assert old.nothing_changed(*plain.pair) is None
    batch = batch_of(WITHOUT[name], 2)
    one, other = old.loss(batch), head.model.loss(batch)
    added = other["change_loss"] + other["change_type_loss"]
    assert other.keys() - one.keys() == {"change_loss", "change_type_loss"}
    torch.testing.assert_close(other["loss"], one["loss"] + HEAD["change_weight"] * added)
    for losses in (one, other):
        losses["loss"].backward()
    gradients = {key: value.grad for key, value in head.model.named_parameters()}
    for key, value in old.named_parameters():
        assert gradients[key] is value.grad is None or torch.equal(gradients[key], value.grad), key
    assert all(value.grad.abs().sum() > 0 for value in head.model.change_head.parameters())
    estimate = head.model.nothing_changed(*head.pair)
    assert estimate is not None and estimate.shape == (len(head.tokens),) and 0 < estimate.min() < estimate.max() < 1
    is_change = torch.zeros(len(head.tokens))
    losses = head.model.validation_losses({**batch_of(name + ", change head"), "is_change": is_change})
    torch.testing.assert_close(
        losses["change_loss"], -estimate.log()
    )  # the losses and the estimate read the same tokens


def test_an_ensemble_averages_the_members_that_have_a_head() -> None:
    one, other, plain = case("scorer, change head"), case("dirl, change head"), case("scorer")
    for models, with_head in (((one, plain), (one,)), ((one, other, plain), (one, other)), ((plain, plain), ())):
        sides = zip(*[one.pair] * len(models))
        estimate = Ensemble([part.model for part in models]).nothing_changed(*map(list, sides))
        own = [part.model.nothing_changed(*one.pair) for part in with_head]
        assert (estimate is None) == (not own)
        assert estimate is None or torch.allclose(estimate, torch.stack(own).mean(0))  # type: ignore[arg-type]
