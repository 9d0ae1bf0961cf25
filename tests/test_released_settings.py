"""The learning rate of the released Chg2Cap, which has another form here; tests/golden holds the values of all settings."""

import pytest
import torch
from torch import nn

from diffcap.compose import compose
from diffcap.experiment import Experiment
from diffcap.lit.schedules import in_steps, make_lr_lambda
from diffcap.utils.settings import get_config_value


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
        total=steps_per_epoch * epochs,
    )
    assert [1e-4 * factor(step) for step in range(steps_per_epoch * epochs)] == pytest.approx(expected)
