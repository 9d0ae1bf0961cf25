"""The training settings of the released programs, as a stage reads them from the settings files."""

from typing import Any

import pytest

from diffcap.experiment import Experiment
from diffcap.features.preprocessing import SCORER_STD
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
