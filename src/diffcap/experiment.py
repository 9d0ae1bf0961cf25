"""One experiment: its dataset, method, features and folders. Make's variables, command-line options or a YAML file describe it.

Every variable of `make finetune DATASET=birds2words SEED=7` is an option of `diffcap finetune --dataset birds2words --seed 7`
and a key of the YAML file that `CONFIG=run.yaml` names (`dataset: birds2words`).
"""

import difflib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from diffcap.compose import MIXED, compose
from diffcap.datasets.registry import SHIPPED_BACKBONES, get_dataset
from diffcap.record import digest
from diffcap.records import JsonDict, read_json
from diffcap.registry import Method, get_method, methods
from diffcap.run_folder import (
    BEST,
    EVAL,
    FINETUNE,
    LAST,
    PRETRAIN,
    PRETRAIN_EXTRA,
    REINFORCE,
    REPORT,
    TRAINING_STAGES,
    TRIAL_VARIABLE,
    WANDB_SWEEP,
    is_finished,
    stage_of,
)
from diffcap.utils.errors import DiffcapError
from diffcap.utils.files import expand_home, served_name
from diffcap.utils.settings import CONFIGS, backbones, get_config_value, read_settings

DEFAULT_SEED = "1234"
CAPTIONS, RETRIEVAL, SWAP = "captions", "retrieval", "swap"  # values of the variable `eval`
PROBE = "probe"  # TRAINER=probe measures a hundred steps and estimates the time of the whole training
# Sections of the YAML file that the variable `config` names; each has the options of one stage.
SECTIONS = ("data", "extract", "negatives", *TRAINING_STAGES, "zeroshot", EVAL, REPORT)
# Keys of lists in the YAML file of a grid of experiments (`diffcap benchmark`) -> the variable whose values the list has
AXES = {"datasets": "dataset", "methods": "method", "seeds": "seed"}


def _option(text: str, default: str = "") -> Any:
    return field(default="", metadata={"help": text, "default": default})


@dataclass(kw_only=True)
class Experiment:
    """The variables of one experiment. "" is replaced by the default. Messages write variables as make does: SEED= for `seed`."""

    dataset: str = _option("name of the dataset; blocks are scenes that diffcap renders", "blocks")
    method: str = _option("a file of configs/method, or a method of another package", "pcl")
    vlm: str = _option(
        "vision-language model that METHOD=vlm starts from: user/name on the Hugging Face Hub, or a folder (default: set by the "
        "method); for zeroshot also openai:MODEL@http://HOST/v1"
    )
    ablation: str = _option("name of an ablation in configs/method/<method>.yaml")
    data: str = _option("folder with the files that the dataset's authors publish (default: they are downloaded)")
    devices: str = _option("number of processes: GPUs, or CPU cores", "1")
    seed: str = _option("seed for rendering, negatives and training", DEFAULT_SEED)
    logger: str = _option("wandb, tensorboard or none", "wandb")
    trainer: str = _option(
        "training length: default, short, smoke (seconds) or probe (estimates the time and memory of a whole training)",
        "default",
    )
    backbone: str = _option(
        "network of the features, an entry of configs/backbones.yaml (default: by method and dataset)"
    )
    features: str = _option("name of the features' folder in FOLDER/features (default: the backbone's name)")
    features_from: str = _option("folder of features that a method's authors published, instead of extracted ones")
    weights: str = _option(
        "file with the backbone's weights (for a method that adapts CLIP, CLIP's weights), if they cannot be downloaded"
    )
    offline: str = _option(
        "yes: no downloads; use the small backbone, tagger and CLIP that are included in diffcap (they were trained on rendered "
        "scenes, so their features of photos are poor)"
    )
    tagger: str = _option("part-of-speech tagger for the negatives: english, blocks, tiles, or a Stanza model's folder")
    folder: str = _option("folder of the prepared dataset: manifest, features, negatives (default: data/<dataset>)")
    run: str = _option("run folder (default: runs/<dataset>/<method>[-<ablation>][-<extra>][-seed<seed>][-probe])")
    pretrain: str = _option("yes, or no to fine-tune from scratch (default: set by the ablation, else yes)")
    pretraining: str = _option("folder of the pre-training that fine-tuning starts from (default: <run>/pretrain)")
    captioner: str = _option("stage whose captioner is evaluated: finetune or reinforce", FINETUNE)
    eval: str = _option("what eval and zeroshot score: captions, swap (also of after, before), or retrieval", CAPTIONS)
    extra: str = _option(
        "more datasets to pre-train on (those in about.pretraining.extra of the method's file), separated by commas: one with "
        "captions gets a pre-training before the main one, one with classes is added to the main one; mixed adds all to the main one"
    )
    pairs: str = _option("number of pairs to render (blocks)")
    config: str = _option("YAML file with these variables and a section of options per stage, or a run's config.yaml")
    extract_args: str = _option("more options of every extraction of features")

    def __post_init__(self) -> None:
        """Read `config`, check the values, fill in the defaults."""
        # `explicit_values`: variables of the command line. `values`: those of the file `config`. `sections`: its options by stage.
        self.explicit_values = {f.name: getattr(self, f.name) for f in VARIABLES if getattr(self, f.name)}
        values, self.sections = _read_config(Path(self.config), self.explicit_values) if self.config else ({}, {})
        for variable in VARIABLES:
            name = variable.name
            setattr(self, name, self.explicit_values.get(name) or values.get(name) or variable.metadata["default"])
        self.dataset_spec, self.method_spec = get_dataset(self.dataset), get_method(self.method)
        self.base_model = self.vlm  # pre-trained model from which the captioner is made; "": see the settings
        # "openai:user/name@http..." -> "openai-user-name-<hash>". The hash differs from that of "openai:user-name".
        served = served_name(self.base_model) or ""
        served = served and re.sub(r"[^\w.-]+", "-", f"{served}-{digest(served)[:6]}")
        self.base_model_name = served or Path(self.base_model.partition("@")[0]).name  # "user/name@revision" -> "name"
        # The names in `extra`, and an experiment for each dataset. The user prepares each dataset by `make data DATASET=<name>`.
        self.extras = tuple(filter(None, (name.strip() for name in self.extra.split(","))))
        self.extra_experiments: list[Experiment] = []
        # Names of datasets in `extra`, by use in the pre-training; "" if no dataset has this use
        self.first_pretraining_dataset = ""  # the dataset of a first pre-training, before the main one
        self.single_image_dataset = ""  # its images and captions are in the main pre-training
        self.labelled_dataset = ""  # its images and classes are in the main pre-training
        if self.offline == "yes" and self.weights and not self.backbone:
            raise DiffcapError(
                f"OFFLINE=yes and WEIGHTS={self.weights}: the networks that are included in diffcap have their own weights; give "
                "one of the two, or BACKBONE= with both."
            )
        has_two_forms = self.method_spec.pixels_backbone is not None  # the method can read features or images
        # True if the section `offline` of the method's file is used. It has settings for the small features of `SHIPPED_BACKBONES`.
        self.uses_offline_settings = False
        # True if the captioner reads images, not features
        self.reads_pixels = self._has_image_network() if has_two_forms else self.method_spec.reads_pixels
        self._default_backbone = self.dataset_spec.backbone_for(self.method_spec, self.reads_pixels)
        if self.offline == "yes" and self._default_backbone not in SHIPPED_BACKBONES:
            self.uses_offline_settings = True
            if has_two_forms:  # the offline settings may change what the captioner reads
                self.reads_pixels = self._has_image_network()
            pixels = self.dataset_spec.clip_backbone or "blocks_pixels"  # the backbone that gives images
            self._default_backbone = pixels if self.reads_pixels else "blocks"
        self.backbone = self.backbone or self._default_backbone
        self.features = self.features or ("authors" if self.features_from else self.backbone)
        has_downloaded_tagger = self.dataset_spec.tagger == "english"
        default_tagger = "blocks" if self.offline == "yes" and has_downloaded_tagger else self.dataset_spec.tagger
        self.tagger = self.tagger or default_tagger
        self.folder = self.folder or f"data/{self.dataset}"
        ablation = self.method_spec.ablations.get(self.ablation)
        pretrains = self.pretrain == "yes" or (self.pretrain != "no" and (ablation is None or ablation.pretrains))
        self.has_pretraining = pretrains and self.method_spec.pretraining is not None
        self._check()
        self.features_folder = Path(self.folder) / "features" / self.features
        if self.extra:
            self._prepare_extra()
        # A run's config.yaml has the name of the features' folder, but not always that of the network that computed them.
        names_network = self.features_from or "backbone" in {**values, **self.explicit_values}
        is_of_run = any(is_run_config(section) for section in self.sections.values())
        if is_of_run and not names_network and not (self.features_folder / "meta.json").is_file():
            raise DiffcapError(
                f"{self.features_folder}: the features of {self.config} are not there, and the file does not say which network "
                "they are from; give BACKBONE= or FEATURES_FROM= as in the first run."
            )
        self.seed, self.devices = str(int(self.seed)), str(int(self.devices))
        name_parts = [self.method, self.base_model_name, self.ablation, *self.extras]
        name_parts.append(f"seed{self.seed}" if self.seed != DEFAULT_SEED else "")
        name_parts.append(PROBE if self.trainer == PROBE else "")
        run = self.run or f"runs/{self.dataset}/{'-'.join(filter(None, name_parts))}"
        is_sweep = TRIAL_VARIABLE in os.environ or (not self.run and WANDB_SWEEP in os.environ)
        self.run = f"{run}/sweep" if is_sweep else run
        self.pretraining = self.pretraining or f"{run}/{PRETRAIN}"
        self._first_pretraining_folder = Path(run) / f"{PRETRAIN}-{self.first_pretraining_dataset}"
        # Checkpoint that fine-tuning starts from, if the method has a pre-training.
        pretraining = self.method_spec.pretraining
        self.pretrained_checkpoint = Path(self.pretraining) / (pretraining.checkpoint if pretraining else LAST)
        # True if fine-tuning starts from a pre-training in this run's folder. With PRETRAINING or in a sweep, it starts from another run's.
        self.owns_pretraining = self.has_pretraining and Path(self.pretraining) == self.stage_folder(PRETRAIN)
        self.checkpoint = self.stage_folder(self.captioner) / BEST  # the trained captioner
        self.evaluated_stage = PRETRAIN if self.eval == RETRIEVAL else self.captioner
        self.evaluated_checkpoint = self.pretrained_checkpoint if self.eval == RETRIEVAL else self.checkpoint

    def _has_image_network(self) -> bool:
        """Return whether the settings of the captioner name a network for images."""
        settings = [compose(self, FINETUNE), *self.sections.values()]
        return get_config_value(settings, "model", "captioner", "init_args", "backbone") is not None

    def _check(self) -> None:
        """Check the values of the variables, and that they fit the method."""
        if not self.seed.isdecimal() or int(self.seed) >= 2**32:
            raise DiffcapError(f"SEED={self.seed} is not a seed; give a whole number from 0 to {2**32 - 1}.")
        if not self.devices.isdecimal() or int(self.devices) < 1:
            raise DiffcapError(f"DEVICES={self.devices} is not a number of processes; give 1 or more.")
        choices: dict[str, Sequence[str]] = {
            "logger": ("wandb", "none", "tensorboard"),
            "captioner": (FINETUNE, REINFORCE),
            "eval": (CAPTIONS, RETRIEVAL, SWAP),
            "pretrain": ("", "yes", "no"),
            "offline": ("", "yes", "no"),
        }
        choices["backbone"] = sorted(backbones())
        # ddp.yaml is not a choice: DEVICES above 1 adds it
        choices["trainer"] = sorted({path.stem for path in (CONFIGS / "trainer").glob("*.yaml")} - {"ddp"})
        for name, values in choices.items():
            if (value := getattr(self, name)) not in values:
                choice = f"one of {', '.join(values)}" if len(values) > 3 else " or ".join(filter(None, values))
                raise DiffcapError(f"{name.upper()}={value} is unknown; give {choice}.")
        ablation_names = self.method_spec.ablation_names
        if self.ablation and self.ablation not in ablation_names:
            names = ", ".join(ablation_names) or "none"
            raise DiffcapError(f"ABLATION={self.ablation} is unknown; {self.method} has: {names}.")
        pretraining = self.method_spec.pretraining
        if self.eval == RETRIEVAL and not (pretraining and pretraining.retrieval and self.has_pretraining):
            names = methods_with(lambda method: bool(method.pretraining and method.pretraining.retrieval))
            raise DiffcapError(
                f"EVAL=retrieval is for a pre-training that learns retrieval; use METHOD={names} with its pre-training."
            )
        if self.vlm and not self.method_spec.base_model_module:
            names = methods_with(lambda method: bool(method.base_model_module))
            raise DiffcapError(f"VLM={self.vlm} is for METHOD={names}; give that method, or leave out VLM.")

    def _prepare_extra(self) -> None:
        """Check `extra`, and determine the role of each of its datasets in the pre-training."""
        pretraining = self.method_spec.pretraining
        if not (pretraining and pretraining.extra):
            names = methods_with(lambda method: bool(method.pretraining and method.pretraining.extra))
            raise DiffcapError(f"EXTRA={self.extra} is for methods whose pre-training takes it; use METHOD={names}.")
        if self.dataset_spec.rendered:
            raise DiffcapError(f"EXTRA={self.extra} adds photos; use a dataset of photos instead of {self.dataset}.")
        for name in self.extras:
            if name not in (*pretraining.extra, MIXED):
                choices = ", ".join([*pretraining.extra, ",".join(pretraining.extra)])
                raise DiffcapError(f"EXTRA={self.extra} is unknown; give {choices}, or {MIXED}.")
        is_mixed = MIXED in self.extras
        if is_mixed and len(self.extras) > 1:
            raise DiffcapError(
                f"EXTRA={self.extra}: mixed trains on all datasets in one stage and cannot be combined; give EXTRA=mixed alone."
            )
        shared = ("method", "backbone", "features", "tagger", "weights", "devices", "seed")
        values = {name: getattr(self, name) for name in shared}
        values["extract_args"] = "" if self.features_from else self.extract_args
        for name in pretraining.extra if is_mixed else self.extras:
            self.extra_experiments.append(Experiment(dataset=name, **values))
            if pretraining.extra[name] == "classes":  # each image has a class; others have captions
                self.labelled_dataset = name
            elif is_mixed:
                self.single_image_dataset = name
            else:
                self.first_pretraining_dataset = name

    def words(self) -> list[str]:
        """Return the variables of the command line as words, such as --seed 7. Values from the file `config` and defaults are left out."""
        return [word for name, value in self.explicit_values.items() for word in (f"--{name}", value)]

    def check_inputs(self, stages: set[str]) -> None:
        """Check before `stages` run: WEIGHTS exists, PRETRAINING is finished, and the method can read the features."""
        weights_readers = set(TRAINING_STAGES) if self.reads_pixels else {"extract"}
        is_missing = not Path(expand_home(self.weights)).is_file()
        if stages & weights_readers and self.weights not in ("", "default", "random") and is_missing:
            raise DiffcapError(f"{self.weights}: no weights file there; check the path given as WEIGHTS.")
        reads_pretraining = FINETUNE in stages or (self.eval == RETRIEVAL and "eval" in stages)
        is_of_other_run = self.has_pretraining and not self.owns_pretraining
        if reads_pretraining and is_of_other_run and not is_finished(Path(self.pretraining)):
            raise DiffcapError(
                f"PRETRAINING={self.pretraining}: contains no finished pre-training; train it first, or omit PRETRAINING."
            )
        if not stages & {PRETRAIN_EXTRA, *TRAINING_STAGES, "zeroshot"}:
            return
        meta_file = self.features_folder / "meta.json"
        if meta_file.is_file():
            source = f"{self.features_folder} holds"
            has_pixels = read_json(meta_file).get("dtype") == "uint8"
        else:
            name = "features_from" if self.features_from else "backbone"
            source = f"{name.upper()}={getattr(self, name)} gives"
            has_pixels = backbones()[self.backbone]["library"] == "pixels" and not self.features_from
        if has_pixels != self.reads_pixels:
            held, read = ("pixels", "features") if has_pixels else ("features", "pixels")
            unfit = [f"{name.upper()}=" for name in ("features", "features_from") if name in self.explicit_values]
            raise DiffcapError(
                f"{source} {held}, and METHOD={self.method} reads {read}; give BACKBONE={self._default_backbone}"
                f"{' and leave out ' + ' and '.join(unfit) if unfit else ''}."
            )

    def stage_folder(self, stage: str) -> Path:
        """Return the folder of a training stage."""
        return self._first_pretraining_folder if stage == PRETRAIN_EXTRA else Path(self.run) / stage

    def setting(self, stage: str, *keys: str) -> Any:
        """Return the value of nested keys in the settings of a training stage; None if the keys are missing."""
        return get_config_value([compose(self, stage)], *keys)


VARIABLES = tuple(fields(Experiment))
NAMES = {f.name for f in VARIABLES}
# The variables that determine the checkpoint of an experiment.
RUN_VARIABLES = ("dataset", "method", "vlm", "ablation", "seed", "extra", "trainer", "run", "captioner", "config")


def is_run_config(settings: Any) -> bool:
    """Return whether `settings` are the content of the config.yaml of a run. Such a file names the run's method, dataset and folder."""
    run = settings.get("run") if isinstance(settings, dict) else None
    return isinstance(run, dict) and all(run.get(name) for name in ("method", "dataset", "out"))


def methods_with(has_property: Callable[[Method], bool]) -> str:
    """Return the names of the methods with a property, for an error message."""
    return " or ".join(name for name, method in methods().items() if has_property(method))


def _read_config(path: Path, explicit_values: dict[str, str]) -> tuple[dict[str, str], JsonDict]:
    """Read a CONFIG file: an experiment file, or the config.yaml that a training stage wrote.

    Returns the variables of the file, and its sections: stage -> options. `explicit_values` are the variables of the command line.
    """
    if not path.is_file():
        raise DiffcapError(f"CONFIG={path}: no such file; give a YAML file, or the config.yaml of a run's stage.")
    content = read_settings(path)
    if not isinstance(content, dict):
        raise DiffcapError(f"{path}: not an experiment; write keys and values, such as `dataset: blocks`.")
    owners = [owner for method in methods().values() for owner in (method, method.pretraining) if owner]
    # Import path of a captioner in an earlier version of diffcap, which old config.yaml files contain -> its import path now
    current_paths = {
        owner.formerly.replace(":", "."): owner.captioner.replace(":", ".") for owner in owners if owner.formerly
    }
    for section in (content, *content.values()):  # `content` is a run's config.yaml, or has a section per stage
        captioner = get_config_value([section], "model", "captioner") if isinstance(section, dict) else None
        if isinstance(captioner, dict) and captioner.get("class_path") in current_paths:
            captioner["class_path"] = current_paths[captioner["class_path"]]
    if isinstance(content.get("run"), dict):
        values = _values_of_run(path, content, explicit_values)
        return values, {stage_of(Path(content["run"]["out"])): content}
    if all(isinstance(content.get(axis), list) for axis in AXES):  # a grid, which is the CONFIG of its experiments
        if not explicit_values.keys() >= {"dataset", "method"}:  # `diffcap benchmark` gives both to every command
            raise DiffcapError(f"CONFIG={path}: is a grid of experiments; run `diffcap benchmark {path}`.")
        content = {key: value for key, value in content.items() if key not in AXES}
    return read_variables(path, content)


def read_variables(where: object, content: Mapping[Any, Any]) -> tuple[dict[str, str], JsonDict]:
    """Return the variables in `content`, a mapping of a YAML file, and its sections: stage -> options. `where`: its place, for messages."""
    variables: dict[str, str] = {}
    sections: JsonDict = {}
    for key, value in content.items():
        name = str(key).lower()
        if name in SECTIONS and isinstance(value, dict):
            sections[name] = value
        elif name in NAMES and not isinstance(value, dict | list):
            text = {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
            variables[name] = "" if value is None else text
        elif name in NAMES:
            raise DiffcapError(
                f"{where}: {key} must be a single value, found {value!r:.60}; write it as in `{key}: x`."
            )
        elif name in SECTIONS:
            raise DiffcapError(f"{where}: {key} must be a section of options, found {value!r:.60}; indent its options.")
        else:
            near = difflib.get_close_matches(name, [*NAMES, *SECTIONS], n=1)
            similar = f", did you mean {near[0]}" if near else ""
            raise DiffcapError(f"{where}: the key {key!r} is unknown{similar}; see docs/train.md for the keys.")
    return variables, sections


def _values_of_run(path: Path, content: JsonDict, explicit_values: dict[str, str]) -> dict[str, str]:
    """Return the variables of a run from its config.yaml. If the command line has another seed or EXTRA, `run` is left out."""
    run, data, model = (content.get(key) or {} for key in ("run", "data", "model"))
    missing = [name for name in ("method", "dataset", "out") if not run.get(name)]
    if missing:
        raise DiffcapError(
            f"{path}: `run.{missing[0]}` is missing (an earlier diffcap wrote the file); write an experiment file with "
            "`dataset:` and `method:` instead, see docs/train.md."
        )
    out, start, features = Path(run["out"]), model.get("init_from"), data.get("features")
    values = {
        "dataset": run["dataset"],
        "method": run["method"],
        "ablation": run.get("ablation"),
        "trainer": run.get("preset"),
        "folder": data.get("folder"),
        "features": features,
        "backbone": features if features in backbones() else None,
        "seed": content.get("seed_everything"),
        "logger": run.get("logger"),
        "devices": (content.get("trainer") or {}).get("devices"),
        "run": str(out.parent),
    }
    if stage_of(out) == FINETUNE:
        values |= {"pretraining": Path(start).parent if start else None, "pretrain": "yes" if start else "no"}
    found = {name: str(value) for name, value in values.items() if value not in (None, "")}
    for name in ("dataset", "method", "ablation"):
        asked = explicit_values.get(name, found.get(name, ""))
        if asked != found.get(name, ""):
            raise DiffcapError(
                f"{name.upper()}={asked}: {path} holds the settings of a run with {name.upper()}={found.get(name, '')}; leave out "
                f"{name.upper()} or CONFIG."
            )
    if explicit_values.get("extra") or explicit_values.get("seed", found.get("seed")) != found.get("seed"):
        del found["run"]
    return found


def parse(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Split a command line into the variables of an experiment and the options of the stage.

    A variable is given as `--features_from X`, `--features-from=X` or `--FEATURES_FROM X`; all words after `--` are options of the stage.
    """
    variables: dict[str, str] = {}
    stage_options: list[str] = []
    remaining = list(words)
    while remaining:
        word = remaining.pop(0)
        if word == "--":
            return variables, stage_options + remaining
        name, equals, value = word.partition("=")
        name = name.removeprefix("--").replace("-", "_").lower()
        # make adds --goals to each command: the targets that the user gave make, such as "finetune eval".
        if not word.startswith("--") or name not in NAMES | {"goals"}:
            stage_options.append(word)
            continue
        if not equals:
            holds_options = name.endswith("_args")  # only their values may begin with "--"
            if not remaining or (remaining[0].startswith("--") and not holds_options):
                raise DiffcapError(f"{word}: the value is missing; write {word} VALUE.")
            value = remaining.pop(0)
        variables[name] = value
    return variables, stage_options
