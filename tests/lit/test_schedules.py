"""Learning-rate schedules against their formulas."""

import math

import pytest
import torch
from torch import nn

from diffcap.compose import compose
from diffcap.experiment import Experiment
from diffcap.lit.schedules import in_steps, make_lr_lambda
from diffcap.utils.errors import DiffcapError
from diffcap.utils.settings import get_config_value
from diffcap.worlds.training.tiles import TilesBackbone


def test_noam_rises_and_falls_with_the_root() -> None:
    rate = make_lr_lambda("noam", warmup=8000)
    for step in (0, 1, 100, 7998):
        assert rate(step) == pytest.approx((step + 1) / 8000)
    assert rate(7999) == pytest.approx(1)
    for step in (8000, 31_999, 249_999):
        assert rate(step) == pytest.approx(math.sqrt(8000 / (step + 1)))
    assert rate(31_999) == pytest.approx(0.5)


def test_piecewise_halves_at_each_milestone() -> None:
    rate = make_lr_lambda("piecewise")  # IDC-PCL: at 10,000 and at 20,000
    assert [rate(step) for step in (0, 9_999, 10_000, 19_999, 20_000, 99_999)] == [1, 1, 0.5, 0.5, 0.25, 0.25]
    assert [make_lr_lambda("piecewise", milestones=[2])(step) for step in range(4)] == [1, 1, 0.5, 0.5]
    assert make_lr_lambda("piecewise", warmup=4, milestones=[2])(2) == pytest.approx(0.5 * 3 / 4)


def test_step_falls_to_a_tenth_at_each_milestone() -> None:
    rate = make_lr_lambda("step", milestones=[3975, 7950])  # SCORER on CLEVR-Change
    assert [rate(step) for step in (0, 3974, 3975, 7949, 7950)] == pytest.approx([1, 1, 0.1, 0.1, 0.01])
    assert [make_lr_lambda("step", milestones=[0.5, 9], total_steps=6)(step) for step in (2, 3, 8, 9)] == pytest.approx(
        [1, 0.1, 0.1, 0.01]
    )
    with pytest.raises(DiffcapError, match=r"depends on trainer\.max_steps, which is not set"):
        make_lr_lambda("step", milestones=[0.5], total_steps=-1)


def test_cosine_warms_up_and_ends_at_zero() -> None:
    rate = make_lr_lambda("cosine", warmup=100, total_steps=1100)
    assert [rate(step) for step in (0, 49, 99)] == pytest.approx([0.01, 0.5, 1.0])
    for step in (100, 350, 600, 1000):
        assert rate(step) == pytest.approx(0.5 * (1 + math.cos(math.pi * (step - 100) / 1000)))
    assert rate(600) == pytest.approx(0.5) and rate(1100) == pytest.approx(0) and rate(2000) == pytest.approx(0)


def test_linear_ends_at_zero_and_a_warm_up_may_be_a_part_of_the_run() -> None:
    rate = make_lr_lambda("linear", warmup=0.1, total_steps=1000)  # CLIP4IDC's captioning
    assert [rate(step) for step in (0, 49, 99)] == pytest.approx([0.01, 0.5, 1.0])
    assert [rate(step) for step in (100, 325, 550, 1000, 2000)] == pytest.approx([1, 0.75, 0.5, 0, 0])
    assert [make_lr_lambda("cosine", warmup=0.5, total_steps=4)(step) for step in range(2)] == [0.5, 1]


@pytest.mark.parametrize(("kind", "warmup", "total"), [("cosine", 2, 0), ("linear", 2, -1), ("noam", 0.1, -1)])
def test_a_schedule_that_ends_with_the_training_needs_its_length(kind, warmup, total) -> None:
    with pytest.raises(DiffcapError, match=rf"model\.schedule {kind} with .* depends on trainer\.max_steps"):
        make_lr_lambda(kind, warmup=warmup, total_steps=total)


@pytest.mark.parametrize("steps", [1, 2, 9, 100])
def test_the_schedule_of_shipped_weights_reaches_zero(steps) -> None:
    (function,) = TilesBackbone(steps=steps).configure_optimizers()["lr_scheduler"]["scheduler"].lr_lambdas
    assert function(0) == pytest.approx(1 / max(1, steps // 10)) and function(2 * steps) == pytest.approx(0)


def test_lengths_in_epochs_follow_the_size_of_the_data() -> None:
    for steps_per_epoch, expected in ((265, 3975), (192, 2880)):  # CLEVR-Change, Image-Editing-Request
        assert in_steps("15ep", lambda count=steps_per_epoch: count, "model.milestones") == expected
    lengths = 0.5, 700, "0.5ep", ".5ep", "15 ep", "1e1ep"
    assert [in_steps(length, lambda: 10, "x") for length in lengths] == [0.5, 700, 5, 5, 150, 100]
    for wrong in ("15", "ep", "xep", "-1ep", "0ep", "nanep", "infep", "1e999ep"):
        with pytest.raises(DiffcapError, match=r"trainer\.max_steps is .*; give a number of steps"):
            in_steps(wrong, lambda: 10, "trainer.max_steps")


def test_chg2caps_rate_is_that_of_a_step_per_epoch() -> None:
    """torch's StepLR(5, 0.5), stepped after each epoch, as in the released program."""
    files = [compose(Experiment(method="chg2cap", dataset="levir_cc"), "finetune")]
    milestones = get_config_value(files, "model", "milestones")
    steps_per_epoch, epochs = 3, 50
    optimizer = torch.optim.Adam([nn.Parameter(torch.zeros(1))], get_config_value(files, "model", "lr"))
    scheduler, expected = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5), []
    for _ in range(epochs):
        expected += [optimizer.param_groups[0]["lr"]] * steps_per_epoch
        optimizer.step()
        scheduler.step()
    factor = make_lr_lambda(
        get_config_value(files, "model", "schedule"),
        milestones=[in_steps(milestone, lambda: steps_per_epoch, "model.milestones") for milestone in milestones],
        total_steps=steps_per_epoch * epochs,
    )
    assert [1e-4 * factor(step) for step in range(steps_per_epoch * epochs)] == pytest.approx(expected)
