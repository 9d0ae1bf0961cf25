"""SCORER and DIRL by the real commands: smoke settings, scoring, a kill, two processes against one; all ablations' settings."""

import pytest
from tests.commands import part_settings

from diffcap.methods.pcl.data import CAPTIONED
from diffcap.registry import import_object, methods

# Dropout and swapping on: their draws are what a resumed run could get wrong.


ABLATIONS = [
    (known.name, stage, name)
    for known in methods().values()
    for name in known.ablation_names
    for stage in ("pretrain", "finetune")
    if not known.base_model and known.named("ablations", name, stage)
]


@pytest.mark.parametrize(("method", "stage", "name"), ABLATIONS, ids="-".join)
def test_an_ablations_settings_build_a_model(method: str, stage: str, name: str) -> None:
    settings = part_settings(method, stage, ablation=name)
    if stage == "pretrain" and "data" in settings:  # some differ in their tasks alone
        assert set(settings["data"]["without"]) < set(CAPTIONED)
    # The row that is the whole method by default need not name a part of it.
    given = settings.get("model", {}).get("captioner", {"init_args": {}})["init_args"]
    assert settings
    base = part_settings(method, "finetune")["model"]["captioner"]["init_args"]
    small = {"network": "ViT-blocks-16", "intra_layers": 3} if method == "clip4idc" else {"feature_channels": 3}
    model = import_object(methods()[method].captioner)(
        **{**base, "width": 16, "heads": 2, "vocabulary_size": 9, **small, **given}
    )
    assert all(model.hyperparameters[key] == value for key, value in given.items())
