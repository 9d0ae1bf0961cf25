"""The settings of a training stage as one dict, composed of parts: files, and parts of the method's file. Later ones override earlier ones.

1. trainer/default.yaml
2. the method's settings of the stage
3. for the dataset, then for each further dataset: dataset/<name>.yaml, then what the method has for it
4. what the method has for the base model (VLM, or the `base` of these settings), for OFFLINE=yes, and for the ablation
5. for the stage reinforce: reinforce/base.yaml, reinforce/<dataset>.yaml and the method's settings of this stage. In steps 2 to 4 and 6
   it has the settings of finetune.
6. trainer/<trainer>.yaml, if it is not the default, what the method has for it (and the base model), and for the stage reinforce also
   reinforce/<trainer>.yaml
7. trainer/ddp.yaml, for several processes
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from diffcap.datasets.registry import datasets as known_datasets
from diffcap.datasets.registry import get_dataset
from diffcap.registry import Method, Part, package_folder, split_names
from diffcap.run_folder import FINETUNE, REINFORCE
from diffcap.utils.errors import DiffcapError
from diffcap.utils.settings import CONFIGS, Settings, get_config_value, read_settings

if TYPE_CHECKING:
    from diffcap.experiment import Experiment


def compose(e: "Experiment", stage: str, datasets: Iterable[str] = ()) -> Settings:
    """The settings of a training stage of an experiment, without its CONFIG, its variables and the options of the command line.

    Args:
        stage: pretrain, finetune or reinforce. datasets: more datasets that the stage trains on.

    Raises:
        DiffcapError: the method has no settings for this stage, or settings for a dataset that is not known.
    """
    settings: Settings = {}
    for part in parts(e, stage, datasets):
        settings = merge(settings, part.settings)
    return settings


def parts(e: "Experiment", stage: str, datasets: Iterable[str] = ()) -> list[Part]:
    """The parts of the settings, in the order of this module's docstring; arguments as `compose`."""
    return list(_parts(e, stage, datasets))


def _parts(e: "Experiment", stage: str, datasets: Iterable[str]) -> Iterator[Part]:
    settings, method = FINETUNE if stage == REINFORCE else stage, e.method_spec
    _check_datasets(method)
    first = [*_file(CONFIGS / "trainer/default.yaml"), *method.stage(settings)]
    if not method.stage(settings):
        raise DiffcapError(f"{method.file}: the section {settings} is missing; write it, see docs/adding.md.")
    for name in (e.dataset, *datasets):
        first += [*_file(_dataset_folder(name) / f"{name}.yaml"), *method.named("datasets", name, settings)]
    yield from first
    base = _base_model_name(e, first, settings)
    yield from method.named("base_models", base, settings)
    if e.offline_settings:
        yield from method.offline(settings)
    yield from method.named("ablations", e.ablation, settings)
    if stage == REINFORCE:
        yield from _file(CONFIGS / "reinforce/base.yaml")
        yield from _file(CONFIGS / f"reinforce/{e.dataset}.yaml")
        yield from method.stage(REINFORCE)
    if e.trainer != "default":
        yield from _file(CONFIGS / f"trainer/{e.trainer}.yaml")
        yield from method.named("trainers", e.trainer, settings)
        yield from method.named("trainers", f"{e.trainer}.{base}", settings)
    if stage == REINFORCE:
        yield from _file(CONFIGS / f"reinforce/{e.trainer}.yaml")
    if e.devices != "1":
        yield from _file(CONFIGS / "trainer/ddp.yaml")


def _file(path: Path) -> list[Part]:
    return [Part(str(path), read_settings(path))] if path.is_file() else []


def _dataset_folder(name: str) -> Path:
    resource = get_dataset(name).configs
    if resource is None:
        return CONFIGS / "dataset"
    package, _, folder = resource.partition(":")
    return package_folder(package, f"`configs` of the dataset {name}") / folder


def _base_model_name(e: "Experiment", found: Iterable[Part], settings: str) -> str:
    """The name of the base model's settings: that of `vlm`, else of the `base` in the section of a stage or in the parts."""
    if e.vlm or not e.method_spec.base_model:
        return e.vlm_name
    section = e.sections.get(settings)
    contents = [*(part.settings for part in found), *([section] if isinstance(section, dict) else [])]
    base = get_config_value(contents, "model", "captioner", "init_args", "base")
    return Path(str(base or "").partition("@")[0]).name


def _check_datasets(method: Method) -> None:
    """Refuse an entry for a dataset that neither a reader nor a settings file makes known."""
    known = {*known_datasets(), "mixed", *(path.stem for path in (CONFIGS / "dataset").glob("*.yaml"))}
    for key in method.content.get("datasets", {}):
        for name in split_names(key):
            if name not in known:
                raise DiffcapError(
                    f"{method.file}: datasets: the dataset {name!r} is unknown; known datasets: {', '.join(sorted(known))}."
                )


def merge(base: Settings, over: Settings, depth: int = 0) -> Settings:
    """Override settings: groups (model, data, ...) and the arguments of a class are merged, every other value is replaced.

    A dict that is a value, such as `data.tasks`, is replaced as a whole. Another class has none of the earlier arguments.
    """
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        is_group = (
            depth == 0 or key == "init_args" or (isinstance(value, dict) and {"class_path", "init_args"} & set(value))
        )
        if not (is_group and isinstance(value, dict) and isinstance(old, dict)) or value.get(
            "class_path", old.get("class_path")
        ) != old.get("class_path"):
            merged[key] = value
        else:
            merged[key] = merge(old, value, depth + 1)
    return merged
