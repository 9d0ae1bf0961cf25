"""Compose the settings of a training stage from YAML files in configs/. A later part overrides earlier ones.

Words in capitals are variables of make: EXTRA names more datasets to pre-train on. The method's file is method/<method>.yaml. It has a
section per stage, and groups of entries with names. For example, the group `datasets` may have the entry
`<dataset>: {both: {model: ...}, finetune: {model: ...}}`: settings for all training stages, and settings for the stage finetune, which
override them. The stage reinforce uses the settings for finetune in steps 2 to 4 and in the entries of step 6.

1. trainer/default.yaml
2. the section of the method's file for the stage
3. for the dataset, and then for each dataset of EXTRA that the stage uses: dataset/<name>.yaml and the entry <name> in `datasets`
4. the entry in `base_models` of the pre-trained model that VLM or the settings name, the settings in `offline` (if OFFLINE=yes), and
   the entry in `ablations` that ABLATION names
5. for the stage reinforce: reinforce/base.yaml, reinforce/<dataset>.yaml and the section reinforce of the method's file
6. if TRAINER is not default: trainer/<trainer>.yaml, and the entries <trainer> and <trainer>.<base model> in `trainers`; for the stage
   reinforce, also reinforce/<trainer>.yaml
7. if several processes train: trainer/ddp.yaml
"""

from copy import deepcopy
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING

from diffcap.datasets.registry import datasets as known_datasets
from diffcap.datasets.registry import get_dataset
from diffcap.registry import Part, package_folder, split_names
from diffcap.run_folder import FINETUNE, PRETRAIN, PRETRAIN_EXTRA, REINFORCE
from diffcap.utils.errors import DiffcapError
from diffcap.utils.settings import CONFIGS, Settings, backbones, get_config_value, read_settings

if TYPE_CHECKING:
    from diffcap.experiment import Experiment

# EXTRA=mixed adds all datasets in `about.pretraining.extra` of the method's file to the main pre-training.
MIXED = "mixed"  # also the name of the entry in `datasets` with the settings for this


def compose(e: "Experiment", stage: str) -> Settings:
    """Return the settings of a stage from these files. Callers override them with CONFIG, other variables and command-line options."""
    # A copy, because the parser converts values in place, and the method's file is read only once.
    return deepcopy(reduce(merge, (part.settings for part in parts(e, stage)), {}))


def parts(e: "Experiment", stage: str) -> list[Part]:
    """Return the parts of a stage's settings, in the order of this module's docstring. The stage extract has one, of backbones.yaml."""
    if stage == "extract":
        return [Part(f"backbones.yaml: {e.backbone}", {"model": {"name": e.backbone, **backbones()[e.backbone]}})]
    method = e.method_spec
    known_names = {*known_datasets(), MIXED, *(path.stem for path in (CONFIGS / "dataset").glob("*.yaml"))}
    for name in (name for key in method.content.get("datasets", {}) for name in split_names(key)):
        if name not in known_names:
            names = ", ".join(sorted(known_names))
            raise DiffcapError(f"{method.file}: datasets: the dataset {name!r} is unknown; known datasets: {names}.")
    # The stage whose settings in the method's file are used in steps 2 to 4 and 6
    section = {PRETRAIN_EXTRA: PRETRAIN, REINFORCE: FINETUNE}.get(stage, stage)
    if not method.stage(section):
        raise DiffcapError(f"{method.file}: the section {section} is missing; write it, see docs/adding.md.")
    found = [*_file("trainer/default"), *method.stage(section)]
    # The first pre-training is on one dataset of EXTRA. The main pre-training is on `e.dataset` and the other datasets of EXTRA.
    first = e.first_pretraining_dataset
    added_datasets = [MIXED] if MIXED in e.extras else [name for name in e.extras if name != first]
    for name in (e.dataset, *{PRETRAIN_EXTRA: [first], PRETRAIN: added_datasets}.get(stage, [])):
        folder = CONFIGS / "dataset"
        if resource := get_dataset(name).configs:  # "package:folder", if another package defines the dataset
            package, _, subfolder = resource.partition(":")
            folder = package_folder(package, f"`configs` of the dataset {name}") / subfolder
        found += [*_file(name, folder), *method.named("datasets", name, section)]
    # Name of the pre-trained model that the captioner is made from: in the variable VLM (`e.base_model`), else in the settings so far
    base_name = e.base_model_name
    if method.base_model_module and not e.base_model:
        contents = [*(part.settings for part in found), e.sections.get(section, {})]  # `sections`: of the CONFIG file
        base = get_config_value(contents, "model", "captioner", "init_args", "base")
        base_name = Path(str(base or "").partition("@")[0]).name  # "user/name@revision" becomes "name"
    found += method.named("base_models", base_name, section)
    if e.uses_offline_settings:
        found += method.offline(section)
    found += method.named("ablations", e.ablation, section)
    if stage == REINFORCE:
        found += [*_file("reinforce/base"), *_file(f"reinforce/{e.dataset}"), *method.stage(REINFORCE)]
    if e.trainer != "default":
        found += [*_file(f"trainer/{e.trainer}"), *method.named("trainers", e.trainer, section)]
        found += method.named("trainers", f"{e.trainer}.{base_name}", section)
    if stage == REINFORCE:
        found += _file(f"reinforce/{e.trainer}")
    return [*found, *_file("trainer/ddp")] if e.devices != "1" else found


def _file(name: str, folder: Path = CONFIGS) -> list[Part]:
    path = folder / f"{name}.yaml"
    return [Part(str(path), read_settings(path))] if path.is_file() else []


def merge(base: Settings, over: Settings, depth: int = 0) -> Settings:
    """Return `base` overridden by `over`. Groups (model, data, ...) and arguments of a class are merged; other values are replaced.

    A dict that is the value of an option, such as `data.tasks`, is replaced as a whole. If `over` has another `class_path` than `base`, the
    `init_args` of `base` are dropped. `depth`: number of nested groups around `base`; 0 for all settings of a stage.
    """
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        is_group = (
            depth == 0 or key == "init_args" or (isinstance(value, dict) and {"class_path", "init_args"} & set(value))
        )
        if is_group and isinstance(value, dict) and isinstance(old, dict):
            is_other_class = value.get("class_path", old.get("class_path")) != old.get("class_path")
            merged[key] = value if is_other_class else merge(old, value, depth + 1)
        else:
            merged[key] = value
    return merged
