"""The training settings of the released programs, as a stage reads them from the settings files."""

from typing import Any

import pytest
import torch
from torch import nn

from diffcap.experiment import Experiment
from diffcap.features.preprocessing import SCORER_STD
from diffcap.lit.schedules import in_steps, make_lr_lambda
from diffcap.utils.settings import CONFIGS, get_config_value

# (method, dataset, stage) -> option -> value of the authors' code.
RELEASED: dict[tuple[str, str, str], dict[str, Any]] = {
    ("pcl", "birds2words", "finetune"): {"data.batch_size": 32, "run.select_after": 2000, "run.patience": 80},
    ("scorer", "clevr_change", "finetune"): {"model.milestones": ["15ep", "30ep", "45ep"], "trainer.max_steps": 10000},
    ("scorer", "spot_the_diff", "finetune"): {"model.milestones": ["15ep", "30ep", "45ep"]},
    ("scorer", "image_editing_request", "finetune"): {"model.milestones": ["15ep", "30ep", "45ep"]},
    ("dirl", "clevr_change", "finetune"): {"model.milestones": ["15ep", "30ep", "45ep"], "trainer.max_steps": 15000},
    ("dirl", "spot_the_diff", "finetune"): {"model.milestones": ["15ep", "30ep", "45ep"]},
    ("dirl", "image_editing_request", "finetune"): {"model.milestones": ["15ep", "30ep", "45ep"]},
    ("clip4idc", "clevr_change", "pretrain"): {"trainer.max_steps": "12ep", "trainer.val_check_interval": "1ep"},
    ("clip4idc", "spot_the_diff", "pretrain"): {"trainer.max_steps": "20ep", "trainer.val_check_interval": "1ep"},
    ("clip4idc", "clevr_change", "finetune"): {"trainer.max_steps": "50ep", "trainer.val_check_interval": "1ep"},
    ("clip4idc", "spot_the_diff", "finetune"): {"trainer.max_steps": "50ep", "trainer.val_check_interval": "1ep"},
    ("rsiccformer", "levir_cc", "finetune"): {
        **{"model.lr": 1e-4, "model.decoder_clip_value": 5, "model.decoder_plateau_factor": 0.7},
        **{
            "data.max_length": 52,
            "data.min_count": 6,
            "trainer.max_steps": "40ep",
            "trainer.val_check_interval": "1ep",
        },
        **{"run.monitor": "val/BLEU-4", "run.patience": 10, "model.captioner.init_args.backbone": None},
    },
    ("chg2cap", "levir_cc", "finetune"): {
        **{
            "model.lr": 1e-4,
            "data.batch_size": 32,
            "data.max_length": 41,
            "data.min_count": 5,
            "run.monitor": "val/BLEU-4",
        },
        **{"trainer.max_steps": "50ep", "trainer.val_check_interval": "1ep", "run.patience": None},
        "model.captioner.init_args.trained_layers": ["layer2", "layer3", "layer4"],
        "model.captioner.init_args.normalization": "levir_cc",
    },
    ("chg2cap", "dubai_cc", "finetune"): {
        **{"data.max_length": 27, "data.min_count": 1, "model.captioner.init_args.resize": [256, 256]},
        "model.captioner.init_args.normalization": "dubai_cc",
    },
}


@pytest.mark.parametrize("where", RELEASED, ids="-".join)
def test_settings_are_those_of_the_released_code(where: tuple[str, str, str]) -> None:
    method, dataset, stage = where
    files = Experiment(method=method, dataset=dataset).config_files(stage)
    found = {option: get_config_value(files, *option.split(".")) for option in RELEASED[where]}
    assert found == RELEASED[where]


def test_features_of_scorer_and_dirl_have_the_released_std_and_those_of_idc_pcl_imagenets() -> None:
    def std(backbone: str) -> Any:
        return get_config_value([CONFIGS / f"backbone/{backbone}.yaml"], "model", "image_std")

    assert tuple(std("resnet101_layer3")) == SCORER_STD == (0.229, 0.224, 0.224)
    assert std("resnet101_layer4") is None


def test_chg2caps_rate_is_that_of_a_step_per_epoch() -> None:
    """torch's StepLR(5, 0.5), stepped after each epoch, as in the released program."""
    files = Experiment(method="chg2cap", dataset="levir_cc").config_files("finetune")
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
