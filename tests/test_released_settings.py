"""The training settings of the released programs, as a stage reads them from the settings files."""

from typing import Any

import pytest
import torch
from torch import nn

from diffcap.compose import compose
from diffcap.experiment import Experiment
from diffcap.features.preprocessing import RCC_STD
from diffcap.lit.schedules import in_steps, make_lr_lambda
from diffcap.utils.settings import CONFIGS, get_config_value

CAPTIONER = "model.captioner.init_args"
# (method, dataset, stage) -> option -> value of the authors' code.
RELEASED: dict[tuple[str, str, str], dict[str, Any]] = {
    ("pcl", "birds2words", "finetune"): {
        **{"data.batch_size": 32, "data.max_length": 80, "data.samples": None, "data.mask_ratio": 0.15},
        **{
            "model.lr": 3e-5,
            "model.weight_decay": 1e-4,
            "model.schedule": "piecewise",
            "model.milestones": [10000, 20000],
        },
        **{"trainer.max_steps": 20000, "trainer.val_check_interval": 85, "run.monitor": "val/ROUGE-L"},
        **{"run.select_after": 2000, "run.patience": 80, "model.tokenizer": "raw"},
        **{
            f"{CAPTIONER}.cross_layers": 2,
            f"{CAPTIONER}.distractor_judging": False,
            f"{CAPTIONER}.objective": "masked",
        },
    },
    ("pcl", "birds2words", "pretrain"): {
        **{"data.tasks": {"mlm": 9, "mvcl": 1, "fda": 2}, "data.batch_size": 150, "data.max_length": 80},
        **{"model.lr": 1e-4, "model.schedule": "noam", "model.warmup": 4000, "trainer.max_steps": 60000},
        f"{CAPTIONER}.cross_layers": 2,
    },
    ("scorer", "clevr_dc", "finetune"): {
        **{"model.lr": 2e-4, "model.milestones": ["15ep", "30ep", "45ep"], "trainer.max_steps": 10000},
        **{
            "data.batch_size": 128,
            "data.samples": "pairs",
            "data.swap": None,
            "data.max_length": 40,
            "data.min_count": 1,
        },
        **{f"{CAPTIONER}.encoder_layers": 1, f"{CAPTIONER}.cross_view_weight": 0.01, f"{CAPTIONER}.cbr_weight": 0.004},
        f"{CAPTIONER}.coordinates": False,
    },
    ("dirl", "clevr_dc", "finetune"): {
        **{"model.lr": 2e-4, "model.milestones": ["15ep", "30ep", "45ep"], "trainer.max_steps": 13000},
        **{
            "data.batch_size": 128,
            "data.samples": "pairs",
            "data.swap": None,
            "data.max_length": 40,
            "data.min_count": 1,
        },
        **{f"{CAPTIONER}.decorrelation_weight": 0.03, f"{CAPTIONER}.ccr_weight": 0.05},
        **{f"{CAPTIONER}.coordinates": False, f"{CAPTIONER}.decoder_variant": "ln_xavier"},
        **{f"{CAPTIONER}.encoder_layers": 2, f"{CAPTIONER}.decoder_layers": 2, "data.trim": False},
    },
    ("scorer", "clevr_change", "finetune"): {"model.milestones": ["15ep", "30ep", "45ep"], "trainer.max_steps": 10000},
    ("scorer", "spot_the_diff", "finetune"): {"model.milestones": ["15ep", "30ep", "45ep"]},
    ("scorer", "image_editing_request", "finetune"): {"model.milestones": ["15ep", "30ep", "45ep"]},
    ("dirl", "clevr_change", "finetune"): {"model.milestones": ["15ep", "30ep", "45ep"], "trainer.max_steps": 15000},
    ("dirl", "spot_the_diff", "finetune"): {"model.milestones": ["15ep", "30ep", "45ep"]},
    ("dirl", "image_editing_request", "finetune"): {"model.milestones": ["15ep", "30ep", "45ep"]},
    ("clip4idc", "clevr_change", "pretrain"): {
        **{"trainer.max_steps": "12ep", "trainer.val_check_interval": "1ep", "trainer.gradient_clip_val": 1.0},
        **{"model.lr": 1e-4, "model.weight_decay": 0.2, "model.schedule": "cosine", "model.warmup": 0.1},
        **{"data.batch_size": 128, "data.max_length": 32, "data.swap": True},
        "model.clip_lr": 3e-6,  # in float32, instead of 1e-7 in half precision
    },
    ("clip4idc", "spot_the_diff", "pretrain"): {"trainer.max_steps": "20ep", "trainer.val_check_interval": "1ep"},
    ("clip4idc", "clevr_change", "finetune"): {
        **{"trainer.max_steps": "50ep", "trainer.val_check_interval": "1ep", "trainer.gradient_clip_val": 1.0},
        **{"model.lr": 1e-4, "model.pretrained_lr": 1e-7, "model.weight_decay": 0.01},
        **{"model.schedule": "linear", "model.warmup": 0.1, "data.batch_size": 16, "run.patience": 11},
    },
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
        **{"data.vocabulary_splits": "all", "model.tokenizer": "ids", "model.pretrained_lr": None},
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
        **{"data.vocabulary_splits": "all", "model.tokenizer": "ids", "model.pretrained_lr": 1e-4},
        "model.captioner.init_args.trained_layers": ["layer2", "layer3", "layer4"],
        "model.captioner.init_args.normalization": "levir_cc",
    },
    ("chg2cap", "dubai_cc", "finetune"): {
        **{"data.max_length": 27, "data.min_count": 1, "model.captioner.init_args.resize": [256, 256]},
        **{"model.captioner.init_args.normalization": "dubai_cc", "data.vocabulary_splits": "all"},
    },
}


# Spot-the-Diff's options for several changes per pair, which no other dataset has.
CHANGES = {"data.changes", "data.multi.max_length", "data.multi.min_count"}

# Options by which Birds-to-Words differs from Spot-the-Diff for every method.
BIRDS = CHANGES | {"data.max_length", "data.min_count"}

# The two pre-training stages of IDC-PCL on the birds: the dataset that EXTRA= adds -> option -> value of the authors' code.
RELEASED_ON_BIRDS: dict[str, dict[str, Any]] = {
    "cub": {
        **{"data.tasks": {"mlm": 9, "mvcl": 1, "fda": 2}, "data.batch_size": 350, "data.max_length": 40},
        **{"model.lr": 1e-4, "model.warmup": 4000, "trainer.max_steps": 60000, f"{CAPTIONER}.single_image": "absent"},
        f"{CAPTIONER}.cross_layers": 2,
    },
    "nabirds": {
        **{"data.tasks": {"mlm": 9, "mvcl": 1, "fda": 2, "fgvc": 3}, "data.batch_size": 150, "data.max_length": 80},
        **{"model.lr": 1e-4, "model.warmup": 4000, "trainer.max_steps": 60000, f"{CAPTIONER}.cross_layers": 2},
    },
}

# (method, dataset, stage) that the authors did not train -> the dataset whose released settings it has, and the options that differ.
BORROWED: dict[tuple[str, str, str], tuple[str, set[str]]] = {
    ("scorer", "birds2words", "finetune"): ("spot_the_diff", BIRDS | {"data.vocabulary_layout", "model.tokenizer"}),
    ("dirl", "birds2words", "finetune"): ("spot_the_diff", BIRDS | {"data.vocabulary_layout", "model.tokenizer"}),
    ("pcl", "clevr_dc", "pretrain"): ("clevr_change", {"data.max_length"}),
    ("pcl", "clevr_dc", "finetune"): ("clevr_change", {"data.max_length"}),
    ("clip4idc", "clevr_dc", "pretrain"): ("clevr_change", {"data.swap"}),
    ("clip4idc", "clevr_dc", "finetune"): ("clevr_change", {"data.samples"}),
    ("clip4idc", "image_editing_request", "pretrain"): ("spot_the_diff", CHANGES),
    ("clip4idc", "image_editing_request", "finetune"): ("spot_the_diff", CHANGES),
}


@pytest.mark.parametrize("dataset", RELEASED_ON_BIRDS)
def test_the_stages_with_cub_and_nabirds_are_those_of_the_released_code(dataset: str) -> None:
    files = [compose(Experiment(method="pcl", dataset="birds2words"), "pretrain", [dataset])]
    found = {option: get_config_value(files, *option.split(".")) for option in RELEASED_ON_BIRDS[dataset]}
    assert found == RELEASED_ON_BIRDS[dataset]


@pytest.mark.parametrize(("stage", "rate"), [("pretrain", "clip_lr"), ("finetune", "pretrained_lr")])
def test_clip_in_half_precision_has_the_released_rate(stage: str, rate: str) -> None:
    experiment = Experiment(method="clip4idc", dataset="clevr_change", ablation="half_precision")
    assert experiment.setting(stage, "model", "half_precision_clip") is True
    assert experiment.setting(stage, "model", rate) == 1e-7


@pytest.mark.parametrize("where", BORROWED, ids="-".join)
def test_a_dataset_that_the_authors_did_not_train_on_has_the_settings_of_another(where: tuple[str, str, str]) -> None:
    (method, dataset, stage), (other, differing) = where, BORROWED[where]
    one, two = (_all_settings(method, name, stage) for name in (dataset, other))
    assert {option for option in one.keys() | two.keys() if one.get(option) != two.get(option)} == differing


def _all_settings(method: str, dataset: str, stage: str) -> dict[str, Any]:
    """Every option of a stage with its value."""
    settings: dict[str, Any] = {}

    def add(prefix: str, values: Any) -> None:
        if not isinstance(values, dict) or prefix == "data.tasks":
            settings[prefix] = values
            return
        for key, value in values.items():
            add(f"{prefix}.{key}".removeprefix("."), value)

    add("", compose(Experiment(method=method, dataset=dataset), stage))
    return settings


@pytest.mark.parametrize("where", RELEASED, ids="-".join)
def test_settings_are_those_of_the_released_code(where: tuple[str, str, str]) -> None:
    method, dataset, stage = where
    files = [compose(Experiment(method=method, dataset=dataset), stage)]
    found = {option: get_config_value(files, *option.split(".")) for option in RELEASED[where]}
    assert found == RELEASED[where]


def test_features_of_scorer_and_dirl_have_the_released_std_and_those_of_idc_pcl_imagenets() -> None:
    def std(backbone: str) -> Any:
        return get_config_value([CONFIGS / f"backbone/{backbone}.yaml"], "model", "image_std")

    assert tuple(std("resnet101_layer3")) == RCC_STD == (0.229, 0.224, 0.224)
    assert std("resnet101_layer4") is None


@pytest.mark.parametrize("method", ["rsiccformer", "chg2cap"])
def test_remote_sensing_has_the_released_vocabulary_and_selection_and_rendered_datasets_those_of_the_other_methods(
    method: str,
) -> None:
    for dataset in ("levir_cc", "levir_mci", "whu_cdc", "second_cc", "dubai_cc", "desk", "blocks", "tiles"):
        experiment = Experiment(method=method, dataset=dataset)
        found = tuple(
            experiment.setting("finetune", *keys) for keys in (("data", "vocabulary_splits"), ("model", "tokenizer"))
        )
        splits = "all" if dataset.endswith(("_cc", "_mci", "_cdc")) else "train"
        assert found == (splits, "ptb" if dataset in ("blocks", "tiles") else "ids"), dataset


def test_a_trained_resnet_has_the_released_rate_and_a_frozen_one_none() -> None:
    expected = {
        ("rsiccformer", None): None,
        ("rsiccformer", "finetuned_backbone"): 1e-4,
        ("rsiccformer", "released_backbone"): None,  # frozen
        ("chg2cap", None): 1e-4,
        ("chg2cap", "finetuned_backbone"): 1e-4,
        ("chg2cap", "released_backbone"): 1e-4,
        ("chg2cap", "features"): None,
    }
    for (method, ablation), rate in expected.items():
        experiment = Experiment(method=method, dataset="levir_cc", ablation=ablation)
        assert experiment.setting("finetune", "model", "pretrained_lr") == rate
        assert experiment.setting("reinforce", "model", "pretrained_lr") is None
    offline = Experiment(method="chg2cap", dataset="levir_cc", offline="yes")
    assert offline.setting("finetune", "model", "pretrained_lr") is None


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
