"""The settings of each stage of an experiment, as the options of the stage in one dictionary.

Those of a training come from the settings files, the section of a CONFIG file, and the variables, in this order.
"""

from pathlib import Path
from typing import Any

from diffcap.experiment import FIRST, MIXED, PROBE, RETRIEVAL, Experiment
from diffcap.run_folder import BEST, FINETUNE, LAST, PRETRAIN, REINFORCE
from diffcap.utils.files import expand_home
from diffcap.utils.settings import CONFIGS, read_settings

Settings = dict[str, Any]


def data(e: Experiment) -> Settings:
    """The dataset, and the size of a rendered one."""
    spec = e.dataset_spec
    return {
        "dataset": e.dataset,
        "out": e.folder,
        "source": expand_home(e.data) or None,
        "seed": int(e.seed) if spec.rendered else None,
        "pairs": int(e.pairs) if e.pairs and spec.pairs else None,
    }


def extract(e: Experiment) -> Settings:
    """The backbone's settings file, or the authors' features."""
    if e.features_from:
        return {"folder": e.folder, "source": expand_home(e.features_from), "name": e.features}
    settings: Settings = read_settings(CONFIGS / f"backbone/{e.backbone}.yaml")
    settings["model"]["name"] = e.features
    if e.weights and not e.reads_pixels:
        settings["model"]["weights"] = expand_home(e.weights)
    settings["data"] = {**settings.get("data", {}), "folder": e.folder}
    settings["trainer"] = {**settings.get("trainer", {}), "devices": e.devices}
    if e.devices != "1":
        settings["trainer"]["strategy"] = "ddp"
    return settings


def negatives(e: Experiment) -> Settings:
    """The tagger."""
    return {"folder": e.folder, "tagger": expand_home(e.tagger), "seed": int(e.seed)}


def eval(e: Experiment) -> Settings:
    """The checkpoint that is evaluated."""
    settings = {"checkpoint": str(e.evaluated), "out": str(e.evaluation), "folder": e.folder, "devices": int(e.devices)}
    return {**settings, "task": RETRIEVAL} if e.eval == RETRIEVAL else settings


def zeroshot(e: Experiment) -> Settings:
    """The base model that the settings of the method name."""
    settings = compose(e, FINETUNE)
    arguments = settings["model"]["captioner"]["init_args"]
    base, revision = arguments.get("base"), arguments.get("revision")
    return {
        "checkpoint": expand_home(e.vlm) or (f"{base}@{revision}" if revision else base),
        "out": str(e.zero_shot_evaluation),
        "folder": e.folder,
        "features": e.features,
        "devices": int(e.devices),
        "prompt": arguments.get("prompt"),
        "sentences": arguments.get("sentences") or 1,
        "max_length": settings["data"].get("max_length"),
        "tokenizer": settings["model"].get("tokenizer") or "ptb",
        "batch_size": 8,
    }


def report(e: Experiment) -> Settings:
    """The evaluation of the run."""
    return {"folder": e.folder, "features": e.features, "runs": {e.method: str(e.evaluation)}, "out": str(e.report)}


def training(e: Experiment, stage: str) -> Settings:
    """The settings of a training stage of an experiment, without the options of the command line."""
    settings = merge(compose(e, stage), e.sections.get(PRETRAIN if stage == FIRST else stage, {}))
    seed = int(e.seed)
    data: Settings = {"folder": e.folder, "features": e.features, "seed": seed}
    model: Settings = {}
    run = {
        "out": str(e.stage_folder(stage)),
        "logger": e.logger,
        "dataset": e.dataset,
        "method": e.method,
        "preset": e.trainer,
    }
    if e.ablation:
        run["ablation"] = e.ablation
    if start := start_of(e, stage):
        model["init_from"] = str(start)
    elif e.weights and e.reads_pixels and stage != REINFORCE:
        model["resnet_weights" if e.method_spec.pixels_backbone else "clip_weights"] = expand_home(e.weights)
    if e.vlm:
        model["captioner"] = {"init_args": {"base": expand_home(e.vlm)}}
    folders = {other.dataset: other.folder for other in e.extra_experiments}
    if stage == FIRST:
        data |= {"folder": folders[e.first_dataset], "vocabulary_with": [e.folder]}
    elif with_captions := e.first_dataset or e.single_images:
        data["vocabulary_with"] = [folders[with_captions]]
    if stage == PRETRAIN:
        data |= {"singles": folders[e.single_images]} if e.single_images else {}
        data |= {"labelled": folders[e.labelled_images]} if e.labelled_images else {}
    if e.trainer == PROBE:
        callbacks = [*(settings["trainer"].get("callbacks") or []), probe(e, stage)]
        settings = merge(settings, {"trainer": {"callbacks": callbacks}})
    return merge(
        settings, {"seed_everything": seed, "model": model, "data": data, "trainer": {"devices": e.devices}, "run": run}
    )


def probe(e: Experiment, stage: str) -> Settings:
    """The callback that measures a training and gets the lengths of the whole training."""
    whole = compose(Experiment(**{**e.explicit_values, "trainer": "default"}), stage)["trainer"]
    lengths = {name: whole[name] for name in ("max_steps", "val_check_interval")}
    return {"class_path": "diffcap.lit.probe.Probe", "init_args": lengths}


def start_of(e: Experiment, stage: str) -> Path | None:
    """The checkpoint that a training stage starts from; None for random weights."""
    if stage == PRETRAIN and e.first_dataset:
        return e.stage_folder(FIRST) / LAST
    if stage == FINETUNE and e.has_pretraining:
        return e.pretrained_checkpoint
    return e.stage_folder(FINETUNE) / BEST if stage == REINFORCE else None


def merge(base: Settings, over: Settings, depth: int = 0) -> Settings:
    """Override settings: groups (model, data, ...) and the arguments of a class are merged, every other value is replaced.

    A dictionary that is a value, such as `data.tasks`, is replaced as a whole, and so are the arguments of another class.
    """
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        is_group = (
            depth == 0 or key == "init_args" or (isinstance(value, dict) and {"class_path", "init_args"} & set(value))
        )
        if is_group and isinstance(value, dict) and isinstance(old, dict):
            is_same_class = value.get("class_path", old.get("class_path")) == old.get("class_path")
            merged[key] = merge(old, value, depth + 1) if is_same_class else value
        else:
            merged[key] = value
    return merged


def files(e: Experiment, stage: str) -> list[Path]:
    """The settings files of a stage with Lightning's command line; later ones override earlier ones."""
    if stage == "extract":
        return [CONFIGS / f"backbone/{e.backbone}.yaml"]
    if stage == FIRST:
        return e.config_files(PRETRAIN, [e.first_dataset])
    if stage != PRETRAIN:
        return e.config_files(stage)
    return e.config_files(
        stage, [MIXED] if MIXED in e.extras else [name for name in e.extras if name != e.first_dataset]
    )


def compose(e: Experiment, stage: str) -> Settings:
    """The settings of a training stage in its files, without the variables and the options of the command line."""
    settings: Settings = {}
    for path in files(e, stage):
        settings = merge(settings, read_settings(path) or {})
    return settings
