"""Losses over the global batch: two gloo processes with unequal shares give the loss and the gradients of one."""

from pathlib import Path

import pytest
import torch
from tests.losses.gather_worker import gradients, losses
from tests.losses.ranks import on_two_ranks

from diffcap.losses.gather import ddp_scaled_sum, detached_sum_over_ranks, gather_rows, global_mean, rank, world_size

pytestmark = pytest.mark.slow  # two processes

CUTS = {"even": 5, "uneven": 7, "nothing": 10}  # rows of the first of two ranks, of ten


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict:
    torch.manual_seed(0)
    data = {
        "model": torch.nn.Linear(6, 6).state_dict(),
        "rows": torch.randn(10, 6),
        "target": torch.randn(10, 6),
        "cuts": CUTS,
    }
    folder = tmp_path_factory.mktemp("gather")
    return {**data, "ranks": on_two_ranks(Path(__file__).with_name("gather_worker.py"), data, folder)}


def test_one_process_is_the_identity() -> None:
    values = torch.tensor([1.0, 2.0, 6.0])
    rows = torch.randn(3, 2)
    assert (world_size(), rank()) == (1, 0)
    assert global_mean(values) == 3 and ddp_scaled_sum(values) == 9 and detached_sum_over_ranks(values.sum()) == 9
    assert global_mean(values[:0]) == 0
    gathered, first = gather_rows(rows)
    assert gathered is rows and first == 0


@pytest.mark.parametrize("case", ["even", "uneven"])
@pytest.mark.parametrize("loss", ["mean", "sum", "nce"])
def test_two_ranks_give_the_loss_and_the_gradients_of_one(data: dict, case: str, loss: str) -> None:
    model = torch.nn.Linear(6, 6)
    model.load_state_dict(data["model"])
    cut = CUTS[case]
    # The negatives of the third loss are the first half of each rank's rows: one process takes the same ones.
    expected = {name: value for name, value in losses(model, data["rows"], data["target"]).items() if name != "nce"}
    out = model(data["rows"])
    negatives = torch.cat([out[: cut // 2], out[cut : cut + (10 - cut) // 2]])
    expected["nce"] = _nce(out, data["target"], negatives)
    wanted = gradients(model, expected[loss])
    shares = [part["cases"][case][loss] for part in data["ranks"]]
    torch.testing.assert_close(sum(share for share, _ in shares) / 2, expected[loss].detach())
    for _, gradient in shares:
        torch.testing.assert_close(gradient, wanted, atol=1e-5, rtol=1e-5)
    assert wanted.abs().max() > 1e-3


def _nce(out: torch.Tensor, target: torch.Tensor, negatives: torch.Tensor) -> torch.Tensor:
    """Naive, so that nothing of the tested code is in it."""
    cosines = torch.stack(
        [torch.stack([torch.cosine_similarity(row, other, dim=0) for other in (*target, *negatives)]) for row in out]
    )
    return (cosines.logsumexp(1) - cosines.diagonal()).mean()


@pytest.mark.parametrize("case", list(CUTS))
def test_rows_are_gathered_in_rank_order(data: dict, case: str) -> None:
    for number, part in enumerate(data["ranks"]):
        assert (part["rank"], part["world"]) == (number, 2)
        assert torch.equal(part["cases"][case]["gathered"], data["rows"])
        assert part["cases"][case]["first"] == (CUTS[case] if number else 0)


def test_a_rank_without_rows_takes_part(data: dict) -> None:
    model = torch.nn.Linear(6, 6)
    model.load_state_dict(data["model"])
    wanted = gradients(model, losses(model, data["rows"], data["target"])["mean"])
    for part in data["ranks"]:
        torch.testing.assert_close(part["cases"]["nothing"]["mean"][1], wanted)
