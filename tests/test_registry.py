"""Settings files of methods: what is composed of them, and the mistakes that they refuse."""

from functools import reduce
from pathlib import Path

import pytest
from tests.commands import part_settings

from diffcap.compose import compose, merge
from diffcap.experiment import Experiment
from diffcap.methods.pcl.data import CAPTION_TASKS
from diffcap.pipeline import run_stage
from diffcap.registry import import_object, methods, read_method
from diffcap.utils.errors import DiffcapError

ABOUT = "about: {title: Mine, paper: none, captioner: mine:Mine, backbone: blocks}\n"


def write(folder: Path, text: str) -> Path:
    file = folder / "mine.yaml"
    file.write_text(ABOUT + text)
    return file


def test_entries_apply_in_the_order_of_the_file_and_may_name_several_datasets(tmp_path: Path) -> None:
    text = (
        "finetune: {model: {a: 1, b: 1, c: 1}}\ndatasets:\n  x, y: {finetune: {model: {b: 2, c: 2}}}\n"
        "  y: {both: {model: {c: 3}}, pretrain: {model: {c: 4}}}\n"
    )
    method = read_method(write(tmp_path, text))
    found = {}
    for name in "xyz":
        parts = [*method.stage("finetune"), *method.named("datasets", name, "finetune")]
        found[name] = reduce(merge, (part.settings for part in parts))["model"]
    assert found == {"x": {"a": 1, "b": 2, "c": 2}, "y": {"a": 1, "b": 2, "c": 3}, "z": {"a": 1, "b": 1, "c": 1}}
    assert [part.source for part in method.named("datasets", "y", "pretrain")] == [
        f"{tmp_path}/mine.yaml: datasets.y"
    ] * 2
    assert method.name == "mine" and method.title == "Mine"


def test_dictionaries_that_are_values_are_replaced_and_another_class_has_none_of_the_arguments() -> None:
    base = {
        "model": {"captioner": {"class_path": "A", "init_args": {"width": 1, "heads": 2}}},
        "data": {"tasks": {"mlm": 1}},
    }
    over = {"model": {"captioner": {"init_args": {"width": 3}}}, "data": {"tasks": {"fda": 2}}}
    captioner = {"class_path": "A", "init_args": {"width": 3, "heads": 2}}
    assert merge(base, over) == {"model": {"captioner": captioner}, "data": {"tasks": {"fda": 2}}}
    other = {"model": {"captioner": {"class_path": "B", "init_args": {"size": 1}}}}
    assert merge(base, other)["model"] == other["model"]


@pytest.mark.parametrize(
    ("text", "output"),
    [
        ("fintune: {}\n", "mine.yaml: the key 'fintune' is unknown; the keys are about, pretrain, finetune,"),
        ("finetune: {modle: {}}\n", "mine.yaml: finetune: the key 'modle' is unknown"),
        ("datasets: {blocks: {fine: {}}}\n", "mine.yaml: datasets.blocks: the key 'fine' is unknown"),
        ("ablations: {x: {titel: X}}\n", "mine.yaml: ablations.x: the key 'titel' is unknown; the keys are title,"),
        ("finetune: 3\n", "mine.yaml: finetune: found 3 where a section is needed"),
        ("finetune: {data: {seed: 1, seed: 2}}\n", "the key 'seed' is repeated in line 2"),
    ],
)
def test_a_mistake_in_a_settings_file_is_one_sentence(tmp_path: Path, text: str, output: str) -> None:
    with pytest.raises(DiffcapError) as error:
        read_method(write(tmp_path, text))
    assert output in str(error.value) and "\n" not in str(error.value)


def test_what_the_registry_needs_must_be_there(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("about: {title: Mine}\n")
    with pytest.raises(DiffcapError, match="about: the key 'paper' is missing; add it"):
        read_method(file)


def test_an_unknown_dataset_and_a_missing_stage_are_one_sentence(tmp_path: Path) -> None:
    e = Experiment()
    e.method_spec = read_method(write(tmp_path, "finetune: {}\ndatasets: {blcks: {finetune: {}}}\n"))
    with pytest.raises(DiffcapError, match=r"mine\.yaml: datasets: the dataset 'blcks' is unknown; known datasets:"):
        compose(e, "finetune")
    e.method_spec = read_method(write(tmp_path, "finetune: {}\n"))
    with pytest.raises(DiffcapError, match=r"mine\.yaml: the section pretrain is missing"):
        compose(e, "pretrain")


@pytest.mark.parametrize("path", ["configs/method/scorer/finetune.yaml", "configs/method/scorer.yaml"])
def test_a_settings_file_of_a_method_is_no_option(path: str) -> None:
    with pytest.raises(DiffcapError, match="`diffcap finetune --dataset blocks --method scorer`"):
        run_stage("finetune", ["--config", path, "--data.folder", "x"])


ABLATIONS = [
    (known.name, stage, name)
    for known in methods().values()
    for name in known.ablation_names
    for stage in ("pretrain", "finetune")
    if not known.base_model_module and known.named("ablations", name, stage)
]


@pytest.mark.parametrize(("method", "stage", "name"), ABLATIONS, ids="-".join)
def test_an_ablations_settings_build_a_model(method: str, stage: str, name: str) -> None:
    settings = part_settings(method, stage, ablation=name)
    if stage == "pretrain" and "data" in settings:  # some differ in their tasks alone
        assert set(settings["data"]["without"]) < set(CAPTION_TASKS)
    # The row that is the whole method by default need not name a part of it.
    given = settings.get("model", {}).get("captioner", {"init_args": {}})["init_args"]
    assert settings
    base = part_settings(method, "finetune")["model"]["captioner"]["init_args"]
    small = {"network": "ViT-blocks-16", "intra_layers": 3} if method == "clip4idc" else {"feature_channels": 3}
    model = import_object(methods()[method].captioner)(
        **{**base, "width": 16, "heads": 2, "vocabulary_size": 9, **small, **given}
    )
    assert all(model.hyperparameters[key] == value for key, value in given.items())
