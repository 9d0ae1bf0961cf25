"""The registry of methods, which has a `Method` for each captioning system. All other code reads the properties of a method there.

A method is described by its settings file, `configs/method/<name>.yaml`:

```yaml
about: {title: ..., paper: ..., captioner: ..., backbone: ...}   # fields of `Method`
finetune: {model: ..., data: ..., trainer: ..., run: ...}        # a training stage; run: when to save and select checkpoints
datasets:                                                        # settings that differ on a dataset, or on several
  levir_cc, levir_mci: {finetune: ...}
base_models: {SmolVLM-256M-Instruct: {finetune: ...}}            # for the variable VLM=
offline: {finetune: ...}                                         # for OFFLINE=yes
ablations: {no_ccr: {title: ..., finetune: ...}}                 # for ABLATION=; with fields of `Ablation`
trainers: {short: {finetune: ...}}                               # for `make finetune TRAINER=short`
```

`datasets`, `base_models`, `ablations` and `trainers` are groups of entries: name -> settings per stage. In an entry and in `offline`, the
key `finetune` has the settings for the stage finetune, and the key `both` those for all training stages. `diffcap.compose` combines these
parts. Classes are import paths ("package.module:Name"), so that this module imports no torch. Another package adds a method by naming
its settings file in an entry point of the group `diffcap.methods`; see docs/adding.md.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from diffcap.run_folder import TRAINING_STAGES
from diffcap.utils.errors import DiffcapError
from diffcap.utils.settings import CONFIGS, Settings, read_settings

T = TypeVar("T")
ENTRY_POINT_GROUP = "diffcap.methods"
BOTH = "both"  # key, in an entry, of settings for all training stages
ENTRY_SECTIONS = ("datasets", "base_models", "ablations", "trainers")  # the groups of entries in a settings file


class Part(NamedTuple):
    """A part of a stage's settings. `source` says where it is written: the path of a file, and the keys in that file."""

    source: str
    settings: Settings


@dataclass(frozen=True)
class Pretraining:
    """The training stage before fine-tuning."""

    captioner: str  # import path of the model that the stage trains
    module: str  # import path of the LightningModule
    data: str  # import path of the LightningDataModule
    checkpoint: str = "last.ckpt"  # name of the stage's checkpoint from which fine-tuning starts
    needs_negatives: bool = False  # whether the stage reads negatives.jsonl
    # The datasets that EXTRA= of `make pretrain` can add, and the annotations of their images: "captions" or "classes"
    extra: Mapping[str, str] = field(default_factory=dict)
    # Import path of the function that evaluates retrieval (EVAL=retrieval); None if the stage does not learn retrieval
    retrieval: str | None = None
    formerly: str | None = None  # earlier import path of `captioner`, which old config.yaml files have


@dataclass(frozen=True)
class Ablation:
    """A row of a paper's ablation table. It changes settings of the method, or pre-trains on more datasets (EXTRA)."""

    title: str  # name of the row in the table
    pretrains: bool = False  # whether the row has the method's pre-training stage
    removes: str | None = (
        None  # captioner's argument that the row switches off; the table of a dataset whose settings switch it off has no such row
    )
    extra: str = ""  # value of EXTRA, for a row that pre-trains on more datasets


@dataclass(frozen=True)
class Method:
    """A captioning system."""

    name: str  # as in METHOD=scorer
    title: str  # as in tables
    paper: str  # citation, for model cards
    captioner: str  # import path of the `Captioner`
    backbone: str  # entry of configs/backbones.yaml with the default settings of the features
    reads_pixels: bool = False  # whether the captioner can only read images, not features
    # Only for a method that can read features or images: the entry that replaces `backbone` if the captioner reads images. The captioner
    # reads images if the setting `model.captioner.init_args.backbone` names a network, which is then a part of the captioner.
    pixels_backbone: str | None = None
    # Only for a method that fine-tunes a vision-language model, which is called its base model (variable VLM): import path of a module
    # with the functions `zero_shot`, which makes a captioner of a base model without training, and `export`.
    base_model_module: str | None = None
    pretraining: Pretraining | None = None
    importer: str | None = None  # import path of the `Importer`, which converts checkpoints of the method's authors
    network: str | None = None  # import path of the function that builds a backbone from a checkpoint of the method
    formerly: str | None = None  # earlier import path of `captioner`, as the config.yaml of an earlier run has it
    order: int = 100  # place in lists of all methods; the smallest comes first
    ablations: Mapping[str, Ablation] = field(default_factory=dict)  # rows of `make ablation`
    file: Path = Path()  # the settings file
    content: Mapping[str, Any] = field(default_factory=dict, repr=False)  # the content of `file`

    @property
    def ablation_names(self) -> list[str]:
        """Names for ABLATION=. Entries that only add datasets (EXTRA) are left out, because they have no settings."""
        entries = self.content.get("ablations", {}).items()
        return sorted(name for name, entry in entries if {BOTH, *TRAINING_STAGES} & set(entry))

    def stage(self, stage: str) -> list[Part]:
        """Return the settings of a stage that are for every dataset."""
        return self._parts(self.content, stage, stage)

    def offline(self, stage: str) -> list[Part]:
        """Return the settings of a stage for OFFLINE=yes."""
        return self._parts(self.content.get("offline", {}), stage, "offline")

    def named(self, group: str, name: str, stage: str) -> list[Part]:
        """Return a stage's settings in all entries of a group (such as `datasets`) whose key has `name`, in the order of the file.

        An entry may have two parts for a stage: the settings in `both`, and then those in the section of the stage.
        """
        parts: list[Part] = []
        for key, entry in self.content.get(group, {}).items():
            if name in split_names(key):
                parts += self._parts(entry, stage, f"{group}.{name}")
        return parts

    def _parts(self, entry: Mapping[str, Any], stage: str, where: str) -> list[Part]:
        return [Part(f"{self.file}: {where}", entry[key]) for key in (BOTH, stage) if key in entry]


def split_names(key: str) -> list[str]:
    """Split the key of an entry, such as "levir_cc, levir_mci", into names."""
    return [name.strip() for name in str(key).split(",")]


def read_method(file: Path) -> Method:
    """Read a method from its settings file. The name of the file is the name of the method."""
    content = read_settings(file)
    _check_keys(file, "", content, ("about", *TRAINING_STAGES, "offline", *ENTRY_SECTIONS))
    for where, entry in _entries(content):
        names = [f.name for f in fields(Ablation)] if where.startswith("ablations.") else []
        _check_keys(file, where, entry, (*names, BOTH, *TRAINING_STAGES))
    for where, entry in (("", content), *_entries(content)):
        for stage in {BOTH, *TRAINING_STAGES} & set(entry):
            _check_keys(file, f"{where}.{stage}".lstrip("."), entry[stage], ("model", "data", "trainer", "run"))
    about = dict(_read_arguments(file, "about", content.get("about", {}), Method))
    if "pretraining" in about:
        section = about["pretraining"]
        about["pretraining"] = Pretraining(**_read_arguments(file, "about.pretraining", section, Pretraining))
    rows = {
        name: Ablation(**{f.name: entry[f.name] for f in fields(Ablation) if f.name in entry})
        for name, entry in content.get("ablations", {}).items()
        if "title" in entry
    }
    return Method(**about, name=file.stem, ablations=rows, file=file, content=content)


def _entries(content: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    """Yield (place in the file, entry) for each entry that has settings of stages. A place is, for example, "trainers.short"."""
    yield "offline", content.get("offline", {})
    for group in ENTRY_SECTIONS:
        for name, entry in (content.get(group) or {}).items():
            yield f"{group}.{name}", entry


def _check_keys(file: Path, where: str, entry: Any, known_keys: Iterable[str]) -> None:
    place = f"{file}: {where}" if where else f"{file}"
    if not isinstance(entry, dict):
        raise DiffcapError(f"{place}: found {entry!r:.60} where a section is needed; indent its keys.")
    for key in entry:
        if key not in known_keys:
            raise DiffcapError(f"{place}: the key {key!r} is unknown; the keys are {', '.join(known_keys)}.")


def _read_arguments(file: Path, where: str, entry: Any, kind: type) -> dict[str, Any]:
    """Return the section `entry`, which has the arguments of the class `kind`, after a check of their names."""
    set_by_reader = ("name", "ablations", "file", "content")
    arguments = [f for f in fields(kind) if f.name not in set_by_reader]
    _check_keys(file, where, entry, [f.name for f in arguments])
    required = [f.name for f in arguments if f.default is f.default_factory]  # equal only if the field has neither
    missing = [name for name in required if name not in entry]
    if missing:
        raise DiffcapError(f"{file}: {where}: the key {missing[0]!r} is missing; add it.")
    return dict(entry)


@cache
def methods() -> Mapping[str, Method]:
    """Return all methods by name, first diffcap's, then those of other packages."""
    built_in = sorted(map(read_method, (CONFIGS / "method").glob("*.yaml")), key=lambda method: method.order)
    by_name = {method.name: method for method in built_in}
    for point in entry_points(group=ENTRY_POINT_GROUP):  # "package:file.yaml"; the package is not imported
        where = f"entry point {ENTRY_POINT_GROUP}: {point.name} = {point.value}"
        file = package_folder(point.module, where) / point.attr
        if file.suffix != ".yaml" or not file.is_file():
            raise DiffcapError(
                f"{where} is not a settings file of a method; write package:<method>.yaml there, with that file in the folder of "
                "the package, and reinstall it."
            )
        _add(by_name, read_method(file), where)
    return MappingProxyType(by_name)


def package_folder(package: str, where: str) -> Path:
    """Return the folder of a package without importing it. `where` is the place of the package's name, for messages."""
    try:
        spec = find_spec(package)
    except ModuleNotFoundError:  # its parent package is missing
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise DiffcapError(f"{where}: the package {package} has no folder; correct its name.")
    return Path(next(iter(spec.submodule_search_locations)))


def get_method(name: str, option: str = "METHOD") -> Method:
    """Return the method with this name, which is the value of `option`."""
    if name not in methods():
        raise DiffcapError(f"{option}={name} is unknown; known methods: {', '.join(methods())}.")
    return methods()[name]


def method_of(captioner: type) -> str:
    """Return the name of the method that has this class as its captioner."""
    path = f"{captioner.__module__}:{captioner.__qualname__}"
    package = path.partition(".")[0]
    # A method with exactly this import path is tried first. The path of a method may also name a module that imports the class.
    for name, method in sorted(methods().items(), key=lambda item: item[1].captioner != path):
        is_in_package = method.captioner.partition(".")[0] == package
        if method.captioner == path or (is_in_package and import_object(method.captioner) is captioner):
            return name
    raise DiffcapError(
        f"{path} is the captioner of no registered method, so its checkpoints could not be loaded; name it in a settings file, "
        f"and that file as the entry point {ENTRY_POINT_GROUP} of its package (see docs/adding.md)."
    )


def import_object(path: str) -> Any:
    """Import "package.module:Name"."""
    module, _, name = path.partition(":")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        files = [str(method.file) for method in methods().values() if path in str(method.content.get("about"))]
        place = " or ".join(files) or "the registry"
        raise DiffcapError(f"{path}: cannot be imported ({error}); correct the import path in {place}.") from error


def base_model_function(name: str) -> Any:
    """Return the function `name` of the module in `Method.base_model_module`. Only one method has such a module."""
    module = next(filter(None, (method.base_model_module for method in methods().values())))
    return import_object(f"{module}:{name}")


def load_plugins(group: str, kind: type[T], built_in: dict[str, T]) -> dict[str, T]:
    """Return objects of class `kind` by name: the built-in ones, and those that other packages have as entry points of a group."""
    by_name = dict(built_in)
    for point in entry_points(group=group):
        where = f"entry point {group}: {point.name} = {point.value}"
        try:
            entry = point.load()
        except Exception as error:  # another package's import may fail in any way
            raise DiffcapError(
                f"{where} cannot be loaded ({type(error).__name__}: {error}); correct or uninstall that package."
            ) from error
        if not isinstance(entry, kind):
            raise DiffcapError(f"{where} is a {type(entry).__name__}; it must be a {kind.__module__}.{kind.__name__}.")
        _add(by_name, entry, where)
    return by_name


def _add(by_name: dict[str, T], entry: T, where: str) -> None:
    name = getattr(entry, "name", "")
    if name in by_name:
        raise DiffcapError(f"{where}: the name {name!r} is taken already; choose another name in that package.")
    by_name[name] = entry
