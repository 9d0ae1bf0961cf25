"""The composed settings of every method on every dataset, as `settings.json.xz` holds them.

A change of structure must leave them as they are. `pytest tests/golden/test_settings.py --write-golden` writes the file again
and prints what differs, for a change that is meant to change settings; its commit says why.
"""

import itertools
import json
import lzma
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from diffcap.compose import compose, merge
from diffcap.datasets.registry import datasets
from diffcap.experiment import Experiment
from diffcap.registry import methods
from diffcap.run_folder import FINETUNE, PRETRAIN, PRETRAIN_EXTRA, REINFORCE
from diffcap.stages import STAGES
from diffcap.utils.settings import read_settings

GOLDEN = Path(__file__).with_name("settings.json.xz")
OWN = "desk"  # a dataset of the user's own, which no settings file names
TRAINERS = ("default", "short", "smoke")
EXTRA = ("cub", "nabirds", "cub,nabirds", "mixed")
FIRST_NAME = "pretrain-cub"  # the pre-training on CUB before the main one
VLMS = ("HuggingFaceTB/SmolVLM-500M-Instruct", "HuggingFaceTB/SmolVLM-256M-Instruct@main", "somebody/unknown-model")
# Settings that say where and by whom a stage runs; they come from the experiment's variables, and test_chain.py has the checkpoints.
OF_THE_RUN = {
    *("seed_everything", "model.init_from", "trainer.devices", "folder", "features", "seed", "out", "devices"),
    *("data.folder", "data.features", "data.seed", "data.vocabulary_with", "data.vocabulary_from", "data.labelled"),
    *("data.singles", "data.multi", "run.out", "run.logger", "run.dataset", "run.method", "run.preset", "run.ablation"),
}
DICT_VALUES = ("tasks", "image_kwargs")  # arguments that are dictionaries
SHOWN = 20


def composed(e: Experiment, stage: str) -> dict[str, Any]:
    """The settings of a stage. No other function of this test knows how they are composed."""
    if stage == "extract":
        settings = compose(e, stage)
        return {"model": settings["model"], "data": settings.get("data", {})}
    if stage == "negatives":
        return {"tagger": e.tagger}
    if stage == "zeroshot":
        return {name: str(value) for name, value in STAGES["zeroshot"].settings(e).items() if value is not None}
    settings = compose(e, PRETRAIN_EXTRA if stage == FIRST_NAME else stage)
    if e.vlm:
        settings = merge(settings, {"model": {"captioner": {"init_args": {"base": e.vlm}}}})
    return settings


def flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """("model.captioner.init_args.width", 512) and so on. A class is named without its module."""
    for key, value in settings.items():
        name = f"{prefix}{key}"
        if name in OF_THE_RUN:
            continue
        if isinstance(value, dict) and key not in DICT_VALUES:
            yield from flat(value, f"{name}.")
        elif key == "class_path":
            yield name, value.rpartition(".")[2]
        else:
            yield name, value


def experiments() -> Iterator[tuple[str, dict[str, str]]]:
    """The stage and the variables of every composition."""
    names = [*datasets(), OWN]
    for method, dataset in itertools.product(methods(), names):
        common = {"method": method, "dataset": dataset}
        stages = [FINETUNE, REINFORCE, *([PRETRAIN] if methods()[method].pretraining else [])]
        for offline, ablation in itertools.product(("no", "yes"), ("", *methods()[method].ablation_names)):
            variables = common | {"offline": offline, "ablation": ablation}
            yield "extract", variables
            for stage, trainer in itertools.product(stages, TRAINERS):
                more = {"trainer": trainer, "pretrain": "yes" if stage == PRETRAIN else ""}
                yield stage, variables | more
                if not ablation:
                    yield stage, variables | more | {"devices": "2"}
        if methods()[method].pretraining:
            for offline in ("no", "yes"):
                yield "negatives", common | {"offline": offline}
        if methods()[method].base_model_module:
            for vlm in VLMS:
                yield "zeroshot", common | {"vlm": vlm}
                for stage, trainer in itertools.product(stages, TRAINERS):
                    yield stage, common | {"trainer": trainer, "vlm": vlm}
    for dataset, extra, trainer in itertools.product(("birds2words", "clevr_change", OWN), EXTRA, TRAINERS):
        variables = {"method": "pcl", "dataset": dataset, "extra": extra, "trainer": trainer}
        yield PRETRAIN, variables
        if "cub" in extra:
            yield FIRST_NAME, variables


def name_of(stage: str, variables: Mapping[str, str]) -> str:
    return " ".join([stage, *(f"{key.upper()}={value}" for key, value in variables.items() if value)])


def compositions() -> dict[str, dict[str, Any]]:
    """name -> settings, in which dots join nested keys."""
    return {
        name_of(stage, variables): dict(sorted(flat(composed(Experiment(**variables), stage))))
        for stage, variables in experiments()
    }


def read_golden() -> dict[str, dict[str, Any]]:
    stored = json.loads(lzma.decompress(GOLDEN.read_bytes()))
    return {name: stored["settings"][number] for name, number in stored["compositions"].items()}


def write_golden(found: Mapping[str, dict[str, Any]]) -> None:
    """Each distinct settings once, and their number for each composition."""
    texts = {name: json.dumps(settings) for name, settings in found.items()}
    numbers = {text: number for number, text in enumerate(dict.fromkeys(texts.values()))}
    stored = {
        "compositions": {name: numbers[text] for name, text in texts.items()},
        "settings": [json.loads(text) for text in numbers],
    }
    GOLDEN.write_bytes(lzma.compress(json.dumps(stored).encode(), preset=9))


def differences(golden: Mapping[str, dict[str, Any]], found: Mapping[str, dict[str, Any]]) -> list[str]:
    """One line for each setting that differs in the same way, with the number of compositions and the first one."""
    places = defaultdict(list)
    for name in golden.keys() | found.keys():
        if name not in found or name not in golden:
            places["not composed any more" if name in golden else "not in the golden file"].append(name)
            continue
        old, new = golden[name], found[name]
        for key in old.keys() | new.keys():
            before, now = (json.dumps(side[key]) if key in side else "(not set)" for side in (old, new))
            if before != now:
                places[f"{key}: {before} -> {now}"].append(name)
    ordered = sorted(places.items(), key=lambda item: (-len(item[1]), item[0]))
    return [f"{line}   in {len(names):,}, such as {min(names)}" for line, names in ordered]


def test_composed_settings_are_the_golden_ones(
    request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    read_once = cache(read_settings)  # each file is part of hundreds of compositions
    for module in ("diffcap.compose", "diffcap.utils.settings"):
        monkeypatch.setattr(f"{module}.read_settings", read_once)
    found = compositions()
    lines = differences(read_golden() if GOLDEN.is_file() else {}, found)
    if request.config.getoption("--write-golden"):
        write_golden(found)
        with capsys.disabled():
            print("\n".join(["", f"{GOLDEN.name} is written again; what differs:", *lines]))
        return
    assert not lines, "\n".join([f"{len(lines)} settings differ from {GOLDEN.name}:", *lines[:SHOWN]])
