"""One experiment: dataset, method, features and folders, from make's variables, command-line options or a YAML file.

Every variable of `make finetune DATASET=birds2words SEED=7` is an option of `diffcap finetune --dataset birds2words --seed 7`
and a key of a file for `CONFIG=run.yaml` (`dataset: birds2words`).
"""

import difflib
import os
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from diffcap.datasets.registry import DatasetSpec, get_dataset
from diffcap.methods import Method, get_method
from diffcap.records import read_json
from diffcap.run_folder import BEST, FINETUNE, PRETRAIN, REINFORCE, STAGES, evaluation_of, report_of
from diffcap.utils.errors import DiffcapError
from diffcap.utils.settings import CONFIGS, read_settings, setting

DEFAULT_SEED = 1234
EXTRAS = ("cub", "nabirds", "mixed")
SECTIONS = ("data", "extract", "negatives", *STAGES, "eval", "report")  # of a file for CONFIG: options of one stage


def _option(text: str, default: str = "") -> Any:
    return field(default="", metadata={"help": text, "default": default})


@dataclass(kw_only=True)
class Experiment:
    """The variables of one experiment. "" stands for the default, which is filled in.

    Raises:
        DiffcapError: a value is unknown, or two do not fit together.
    """

    dataset: str = _option("name of the dataset", "blocks")
    method: str = _option("pcl, scorer, dirl, clip4idc, or a method of another package", "pcl")
    ablation: str = _option("a row of the method's ablation: a file of configs/method/<method>/ablation")
    data: str = _option("folder with the dataset's official files; without it they are downloaded")
    devices: str = _option("number of processes: GPUs, or CPU cores", "1")
    seed: str = _option("of rendering, negatives and training", str(DEFAULT_SEED))
    logger: str = _option("wandb, tensorboard or none", "wandb")
    trainer: str = _option("a file of configs/trainer: default, short (small datasets) or smoke (seconds)", "default")
    backbone: str = _option("features: a file of configs/backbone; by default the method's for the dataset")
    features: str = _option("name of the features' folder; by default the backbone's")
    features_from: str = _option("folder of features that the authors of a method released, instead of extracting")
    weights: str = _option("file with the backbone's weights (CLIP4IDC: CLIP's), where there is no network")
    offline: str = _option(
        "yes: no downloads; the small backbone, tagger and CLIP that ship with diffcap (they were trained on rendered scenes: "
        "their features of photos are poor)"
    )
    tagger: str = _option("of the hard negatives: english, blocks, or a folder of a Stanza model")
    folder: str = _option("of the manifest and the features; data/<dataset>")
    run: str = _option("folder of the run; runs/<dataset>/<method>[-<ablation>][-<extra>][-seed<seed>]")
    pretrain: str = _option("no: fine-tune from scratch")
    pretraining: str = _option("folder of a pre-training that fine-tuning starts from; <run>/pretrain")
    captioner: str = _option("whose captions are evaluated: finetune or reinforce", FINETUNE)
    extra: str = _option("more datasets in IDC-PCL's pre-training: cub, nabirds, cub,nabirds or mixed")
    cub_data: str = _option("folder with CUB's files")
    nabirds_data: str = _option("folder with NABirds' files")
    cub_features_from: str = _option("as features_from, for CUB")
    nabirds_features_from: str = _option("as features_from, for NABirds")
    cub_folder: str = _option("as folder, for CUB")
    nabirds_folder: str = _option("as folder, for NABirds")
    cub_run: str = _option("folder of the pre-training on CUB; <run>/pretrain-cub")
    pairs: str = _option("number of pairs to render (blocks)")
    images: str = _option("number of images to render (stand-ins of CUB and NABirds)")
    config: str = _option("YAML file with these variables and a section of options per stage, or a run's config.yaml")
    extract_args: str = _option("more options of every extraction of features")
    cub_args: str = _option("more options of the pre-training on CUB")

    spec: DatasetSpec = field(init=False)
    system: Method = field(init=False)
    sections: dict[str, Any] = field(init=False)
    given: dict[str, str] = field(init=False)
    _default_backbone: str = field(init=False)
    _offline_settings: bool = field(init=False)  # False for a dataset whose own defaults need no network

    def __post_init__(self) -> None:
        """Read `config`, check the values, fill in the defaults."""
        self.given = {f.name: getattr(self, f.name) for f in VARIABLES if getattr(self, f.name)}
        self.sections = {}
        values: dict[str, str] = {}
        if self.config:
            values, self.sections = from_file(Path(self.config))
        for variable in VARIABLES:
            chosen = self.given.get(variable.name) or values.get(variable.name) or variable.metadata["default"]
            setattr(self, variable.name, chosen)
        self.spec, self.system = get_dataset(self.dataset), get_method(self.method)
        self._default_backbone = default_backbone = self.spec.backbone_for(self.system)
        if self.offline == "yes":
            self._default_backbone = "blocks_pixels" if self.system.reads_pixels else "blocks"
        self._offline_settings = self._default_backbone != default_backbone
        if self.offline == "yes" and self.weights and not self.backbone:
            raise DiffcapError(
                f"OFFLINE=yes and WEIGHTS={self.weights}: the networks that ship with diffcap have their own weights; give one of "
                "the two, or BACKBONE= with both."
            )
        self.backbone = self.backbone or self._default_backbone
        self.features = self.features or ("authors" if self.features_from else self.backbone)
        self.tagger = self.tagger or ("blocks" if self.offline == "yes" else self.spec.tagger)
        self.folder = self.folder or f"data/{self.dataset}"
        self.cub_folder = self.cub_folder or f"data/{self.spec.cub}"
        self.nabirds_folder = self.nabirds_folder or f"data/{self.spec.nabirds}"
        self._check()
        names = [
            self.method,
            self.ablation,
            *self.extras,
            *([f"seed{self.seed}"] if self.seed != str(DEFAULT_SEED) else []),
        ]
        home = self.run or f"runs/{self.dataset}/{'-'.join(filter(None, names))}"
        sweep = not self.run and "WANDB_SWEEP_ID" in os.environ  # its trainings have folders beside the run's own
        self.run = f"{home}/sweep" if sweep else home
        self.cub_run = self.cub_run or f"{self.run}/pretrain-cub"
        self.pretraining = self.pretraining or f"{home}/{PRETRAIN}"

    def _check(self) -> None:
        if not self.seed.isdigit() or int(self.seed) >= 2**32:
            fault = "negative" if self.seed.startswith("-") else "not a seed"
            raise DiffcapError(f"SEED={self.seed} is {fault}; give a whole number from 0 to {2**32 - 1}.")
        if not self.devices.isdigit() or int(self.devices) < 1:
            raise DiffcapError(f"DEVICES={self.devices} is not a number of processes; give 1 or more.")
        self._choice("logger", ("wandb", "none", "tensorboard"))
        self._choice("captioner", (FINETUNE, REINFORCE))
        self._choice("pretrain", ("", "yes", "no"))
        self._choice("offline", ("", "yes", "no"))
        self._file("trainer", CONFIGS / "trainer")
        self._file("backbone", CONFIGS / "backbone")
        folder = self.method_configs / "ablation"
        known = sorted({path.name.partition(".")[0] for path in folder.glob("*.yaml")})
        if self.ablation and self.ablation not in known:
            raise DiffcapError(f"ABLATION={self.ablation} is unknown; {self.method} has: {', '.join(known) or 'none'}.")
        for name in self.extras:
            if name not in EXTRAS:
                raise DiffcapError(f"EXTRA={self.extra} is unknown; give cub, nabirds, cub,nabirds, or mixed.")
        if "mixed" in self.extras and len(self.extras) > 1:
            raise DiffcapError(
                f"EXTRA={self.extra}: mixed has both datasets in one stage, cub is a stage of its own; give one of the two."
            )
        if self.extras and not (self.system.pretraining and self.system.pretraining.extra):
            raise DiffcapError(f"EXTRA={self.extra} is for methods whose pre-training takes it; use METHOD=pcl.")

    def _choice(self, name: str, known: Sequence[str]) -> None:
        value = getattr(self, name)
        if value not in known:
            raise DiffcapError(f"{name.upper()} is {value}; give {' or '.join(filter(None, known))}.")

    def _file(self, name: str, folder: Path) -> None:
        known = sorted(path.stem for path in folder.glob("*.yaml"))
        value = getattr(self, name)
        if value not in known:
            raise DiffcapError(f"{name.upper()}={value} is unknown; give one of {', '.join(known)}.")

    @property
    def extras(self) -> tuple[str, ...]:
        """The parts of `extra`."""
        return tuple(filter(None, self.extra.split(",")))

    @property
    def pretrains(self) -> bool:
        """Whether the experiment has a pre-training stage: by PRETRAIN, or else by its ablation."""
        if self.system.pretraining is None or self.pretrain == "no":
            return False
        row = self.system.ablations.get(self.ablation)
        return self.pretrain == "yes" or row is None or row.pretrains

    @property
    def store(self) -> Path:
        """Folder of the features."""
        return Path(self.folder) / "features" / self.features

    def check_features(self) -> None:
        """Check, before the features are extracted, that the method can be trained on them.

        Raises:
            DiffcapError: the method reads features and the backbone gives pixels, or the other way round.
        """
        meta = self.store / "meta.json"
        if meta.is_file():
            where = f"{self.store} holds"
            has_pixels = read_json(meta).get("dtype") == "uint8"
        else:
            where = (
                f"FEATURES_FROM={self.features_from} gives" if self.features_from else f"BACKBONE={self.backbone} gives"
            )
            library = setting([CONFIGS / f"backbone/{self.backbone}.yaml"], "model", "library")
            has_pixels = library == "pixels" and not self.features_from
        if has_pixels != self.system.reads_pixels:
            kinds = ("pixels", "features") if has_pixels else ("features", "pixels")
            raise DiffcapError(
                f"{where} {kinds[0]}, and METHOD={self.method} reads {kinds[1]}; give "
                f"BACKBONE={self._default_backbone}."
            )

    @property
    def method_configs(self) -> Path:
        """Folder of the method's settings."""
        return _folder_of(self.system.configs) or CONFIGS / "method" / self.method

    def stage_folder(self, stage: str) -> Path:
        """Folder of a training stage."""
        return Path(self.run) / stage

    @property
    def checkpoint(self) -> Path:
        """Checkpoint of the captioner that is evaluated."""
        return self.stage_folder(self.captioner) / BEST

    @property
    def evaluation(self) -> Path:
        """Folder of the captioner's evaluation."""
        return Path(self.run) / evaluation_of(self.captioner)

    @property
    def report(self) -> Path:
        """Folder of the captioner's report."""
        return Path(self.run) / report_of(self.captioner)

    @property
    def start(self) -> Path:
        """Checkpoint that fine-tuning starts from, if the experiment has a pre-training."""
        assert self.system.pretraining is not None
        return Path(self.pretraining) / self.system.pretraining.checkpoint

    def config_files(self, stage: str, datasets: Iterable[str] = ()) -> list[Path]:
        """Settings of a training stage, in the order in which later files override earlier ones.

        1. trainer/default.yaml
        2. <stage>.yaml of the method
        3. of the dataset, and of each of `datasets`: dataset/<name>.yaml, then <stage>.<name>.yaml of the method
        4. <stage>.offline.yaml of the method, for OFFLINE=yes
        5. the ablation's <name>.yaml and <name>.<stage>.yaml
        6. reinforce/base.yaml and reinforce/<dataset>.yaml, for that stage, which has the settings of fine-tuning besides
        7. trainer/<trainer>.yaml, if it is not the default, and reinforce/<trainer>.yaml
        8. trainer/ddp.yaml, for several processes

        Args:
            datasets: more datasets of the stage. Files that do not exist are left out.
        """
        settings = FINETUNE if stage == REINFORCE else stage
        own = self.method_configs
        files = [CONFIGS / "trainer/default.yaml", own / f"{settings}.yaml"]
        for name in (self.dataset, *datasets):
            place = _folder_of(get_dataset(name).configs) or CONFIGS / "dataset"
            files += [place / f"{name}.yaml", own / f"{settings}.{name}.yaml"]
        if self._offline_settings:
            files.append(own / f"{settings}.offline.yaml")
        if self.ablation:
            files += [own / f"ablation/{self.ablation}.yaml", own / f"ablation/{self.ablation}.{settings}.yaml"]
        if stage == REINFORCE:
            files += [CONFIGS / "reinforce/base.yaml", CONFIGS / f"reinforce/{self.dataset}.yaml"]
        if self.trainer != "default":
            files.append(CONFIGS / f"trainer/{self.trainer}.yaml")
        if stage == REINFORCE:
            files.append(CONFIGS / f"reinforce/{self.trainer}.yaml")
        if self.devices != "1":
            files.append(CONFIGS / "trainer/ddp.yaml")
        if not files[1].is_file():
            raise DiffcapError(
                f"{files[1]}: the settings of {self.method} for this stage are missing; write that file."
            )
        return [file for file in files if file.is_file()]

    def words(self) -> list[str]:
        """The command-line options that make the same experiment."""
        return [word for name, value in self.given.items() for word in (f"--{name}", value)]


VARIABLES = tuple(f for f in fields(Experiment) if f.init)
NAMES = {f.name for f in VARIABLES}


def _folder_of(resource: str | None) -> Path | None:
    """The folder that "package:folder" stands for."""
    if resource is None:
        return None
    package, _, folder = resource.partition(":")
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise DiffcapError(f"{resource}: the package {package} has no folder; correct `configs` in the registry.")
    return Path(next(iter(spec.submodule_search_locations))) / folder


def from_file(path: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """Read a file for CONFIG: variables, and options by stage; or the config.yaml of a run's stage.

    Raises:
        DiffcapError: the file is missing or damaged, or a key is unknown.
    """
    if not path.is_file():
        raise DiffcapError(f"CONFIG={path}: no such file; give a YAML file, or the config.yaml of a run's stage.")
    content = read_settings(path)
    if not isinstance(content, dict):
        raise DiffcapError(f"{path}: not an experiment; write keys and values, such as `method: scorer`.")
    if isinstance(content.get("run"), dict):
        return _from_run(path, content)
    variables, sections = {}, {}
    for key, value in content.items():
        name = str(key).lower()
        if name in SECTIONS and isinstance(value, dict):
            sections[name] = value
        elif name in NAMES and not isinstance(value, dict | list):
            variables[name] = _text(value)
        else:
            raise DiffcapError(f"{path}: the key {key!r} is unknown{_similar(name)}; see docs/train.md for the keys.")
    return variables, sections


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else str(value)


def _from_run(path: Path, content: dict[str, Any]) -> tuple[dict[str, str], dict[str, Any]]:
    run, data, model = (content.get(key) or {} for key in ("run", "data", "model"))
    if not run.get("method") or not run.get("out"):
        raise DiffcapError(
            f"{path}: it does not name its method (an earlier diffcap wrote it); run "
            f"`diffcap finetune --config {path}`, or write a file with `dataset:` and `method:`."
        )
    out = Path(run["out"])
    stage = next((name for name in STAGES if out.name.startswith(name)), FINETUNE)
    start = model.get("init_from")
    values = {
        "dataset": run["dataset"],
        "method": run["method"],
        "ablation": run.get("ablation"),
        "trainer": run.get("preset"),
        "folder": data.get("folder"),
        "features": data.get("features"),
        "seed": content.get("seed_everything"),
        "logger": run.get("logger"),
        "devices": (content.get("trainer") or {}).get("devices"),
        "run": str(out.parent),
        **({"pretraining": str(Path(start).parent) if start else None} if stage == FINETUNE else {}),
        **({"pretrain": "yes" if start else "no"} if stage == FINETUNE else {}),
    }
    return {name: str(value) for name, value in values.items() if value not in (None, "")}, {stage: content}


def _similar(name: str) -> str:
    near = difflib.get_close_matches(name, [*NAMES, *SECTIONS], n=1)
    return f", did you mean {near[0]}" if near else ""


def parse(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Split a command line into the variables of an experiment and the rest, the stage's own options.

    A variable is `--cub_data X`, `--cub-data=X` or `--CUB_DATA X`. Everything after `--` is the stage's own.

    Raises:
        DiffcapError: a variable has no value.
    """
    variables: dict[str, str] = {}
    rest: list[str] = []
    waiting = list(words)
    while waiting:
        word = waiting.pop(0)
        if word == "--":
            rest += waiting
            break
        name, equals, value = word.partition("=")
        name = name.removeprefix("--").replace("-", "_").lower()
        if not word.startswith("--") or name not in NAMES | {"goals"}:
            rest.append(word)
            continue
        if not equals:
            if not waiting:
                raise DiffcapError(f"{word}: the value is missing; write {word} VALUE.")
            value = waiting.pop(0)
        variables[name] = value
    return variables, rest


def options_help() -> str:
    """The variables of an experiment as lines of a help text."""
    return "\n".join(
        f"  --{f.name:<22} {f.metadata['help']}{f' ({default})' if (default := f.metadata['default']) else ''}"
        for f in VARIABLES
    )


def split_words(text: str) -> list[str]:
    """Options in one string, as a shell splits them."""
    return shlex.split(text)
