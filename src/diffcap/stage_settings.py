"""The settings of each stage of an experiment, as the options of the stage in one dictionary.

Those of a training come from the settings files, the section of a CONFIG file, and the variables, in this order.
"""

from functools import reduce
from pathlib import Path

from diffcap.compose import merge
from diffcap.compose import parts as training_parts
from diffcap.experiment import FIRST, MIXED, PROBE, RETRIEVAL, Experiment
from diffcap.registry import Part
from diffcap.run_folder import BEST, FINETUNE, LAST, PRETRAIN, REINFORCE
from diffcap.utils.files import expand_home
from diffcap.utils.settings import CONFIGS, Settings, read_settings


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


def parts(e: Experiment, stage: str) -> list[Part]:
    """The parts of the settings of a stage with Lightning's command line; later ones override earlier ones."""
    if stage == "extract":
        path = CONFIGS / f"backbone/{e.backbone}.yaml"
        return [Part(str(path), read_settings(path))]
    if stage == FIRST:
        return training_parts(e, PRETRAIN, [e.first_dataset])
    if stage != PRETRAIN:
        return training_parts(e, stage)
    return training_parts(
        e, stage, [MIXED] if MIXED in e.extras else [name for name in e.extras if name != e.first_dataset]
    )


def compose(e: Experiment, stage: str) -> Settings:
    """The settings of a training stage, without the variables and the options of the command line."""
    return reduce(merge, (part.settings for part in parts(e, stage)), {})
