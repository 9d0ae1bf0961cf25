"""Losses over the global batch: two gloo processes with unequal shares give the loss and the gradients of one."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.losses.ranks import on_two_ranks
from torch import Tensor, nn

from diffcap.losses.gather import detached_sum_over_ranks, gather_rows, global_mean, rank, world_size
from diffcap.losses.pair_text import pair_text_contrastive_loss
from diffcap.methods.pcl.losses import class_contrastive_loss, masked_visual_nce

pytestmark = pytest.mark.slow  # two processes

CUTS = {"even": 5, "uneven": 7, "nothing": 10}  # rows of the first of two ranks, of ten
CLASSES = torch.tensor([0, 1, 0, 2, 2, 2, 1, 0, 0, 3])
LOSSES = ("mean", "nce", "classes", "pair_text")


def losses(model: nn.Module, rows: Tensor, target: Tensor, classes: Tensor) -> dict[str, Tensor]:
    """A rank's share of losses of `rows` (n, D): one that adds up over rows, and three where each row sees all."""
    out = model(rows)
    each = out.square().sum(1)
    found = {"mean": global_mean(each)}
    if world_size() == 1 or 0 < len(rows) < len(CLASSES):
        found["nce"] = global_mean(masked_visual_nce(out, target, out[: len(out) // 2]))
        found["classes"] = global_mean(class_contrastive_loss(out, classes))
        found["pair_text"] = global_mean(pair_text_contrastive_loss(out, target, torch.tensor(1.2).exp()))
    return found


def gradients(model: nn.Module, loss: Tensor) -> Tensor:
    """Gradient of all parameters, averaged over the ranks as DDP does."""
    model.zero_grad()
    loss.backward(retain_graph=True)  # the losses share what the model gave
    flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    if world_size() > 1:
        dist.all_reduce(flat)
    return flat / world_size()


def linear(data: dict[str, Any]) -> nn.Module:
    model = nn.Linear(6, 6)
    model.load_state_dict(data["model"])
    return model


def share(data: dict[str, Any]) -> dict[str, Any]:
    """What a rank computes from its rows."""
    model, cases = linear(data), {}
    for case, cut in CUTS.items():
        mine = slice(0, cut) if rank() == 0 else slice(cut, None)
        parts = losses(model, data["rows"][mine], data["target"][mine], CLASSES[mine])
        cases[case] = {name: (loss.detach(), gradients(model, loss)) for name, loss in parts.items()}
        cases[case]["gathered"], cases[case]["first"] = gather_rows(data["rows"][mine])
    return {"rank": rank(), "world": world_size(), "cases": cases}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    torch.manual_seed(0)
    data = {"model": nn.Linear(6, 6).state_dict(), "rows": torch.randn(10, 6), "target": torch.randn(10, 6)}
    return {**data, "ranks": on_two_ranks(share, data, tmp_path_factory.mktemp("gather"))}


def test_one_process_is_the_identity() -> None:
    values = torch.tensor([1.0, 2.0, 6.0])
    rows = torch.randn(3, 2)
    assert (world_size(), rank()) == (1, 0)
    assert global_mean(values) == 3 and detached_sum_over_ranks(values.sum()) == 9
    assert global_mean(values[:0]) == 0
    gathered, first = gather_rows(rows)
    assert gathered is rows and first == 0


@pytest.mark.parametrize("case", ["even", "uneven"])
@pytest.mark.parametrize("loss", LOSSES)
def test_two_ranks_give_the_loss_and_the_gradients_of_one(data: dict[str, Any], case: str, loss: str) -> None:
    model, cut = linear(data), CUTS[case]
    expected = losses(model, data["rows"], data["target"], CLASSES)
    # The negatives of this loss are the first half of each rank's rows: one process takes the same ones.
    out = model(data["rows"])
    negatives = torch.cat([out[: cut // 2], out[cut : cut + (10 - cut) // 2]])
    expected["nce"] = _nce(out, data["target"], negatives)
    wanted = gradients(model, expected[loss])
    shares = [part["cases"][case][loss] for part in data["ranks"]]
    torch.testing.assert_close(sum(share for share, _ in shares) / 2, expected[loss].detach())
    for _, gradient in shares:
        torch.testing.assert_close(gradient, wanted, atol=1e-5, rtol=1e-5)
    assert wanted.abs().max() > 1e-3


def _nce(out: Tensor, target: Tensor, negatives: Tensor) -> Tensor:
    """Naive, so that nothing of the tested code is in it."""
    cosines = torch.stack(
        [torch.stack([torch.cosine_similarity(row, other, dim=0) for other in (*target, *negatives)]) for row in out]
    )
    return (cosines.logsumexp(1) - cosines.diagonal()).mean()


@pytest.mark.parametrize("case", CUTS)
def test_rows_are_gathered_in_rank_order(data: dict[str, Any], case: str) -> None:
    for number, part in enumerate(data["ranks"]):
        assert (part["rank"], part["world"]) == (number, 2)
        assert torch.equal(part["cases"][case]["gathered"], data["rows"])
        assert part["cases"][case]["first"] == (CUTS[case] if number else 0)


def test_a_rank_without_rows_takes_part(data: dict[str, Any]) -> None:
    model = linear(data)
    wanted = gradients(model, losses(model, data["rows"], data["target"], CLASSES)["mean"])
    for part in data["ranks"]:
        torch.testing.assert_close(part["cases"]["nothing"]["mean"][1], wanted)
