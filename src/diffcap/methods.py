"""The registry of methods: one `Method` each, from which all other code gets what it needs to know of a method.

Classes are import paths ("package.module:Name"), so that this module imports no torch.

Another package adds its own methods through the entry point group `diffcap.methods`; see docs/adding.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import Any, TypeVar

from diffcap.utils.errors import DiffcapError

T = TypeVar("T")


@dataclass(frozen=True)
class Pretraining:
    """The training stage before fine-tuning.

    Attributes:
        captioner: import path of the model that it trains.
        module: import path of the LightningModule. data: import path of the LightningDataModule.
        checkpoint: file of the stage that fine-tuning starts from.
        needs_negatives: whether it reads negatives.jsonl.
        extra: the datasets that EXTRA can add, and what their images have: "captions" or "classes".
        retrieval: whether it learns to retrieve pairs by captions and captions by pairs, which EVAL=retrieval evaluates.
    """

    captioner: str
    module: str = "diffcap.lit.pretraining:Pretraining"
    data: str = "diffcap.data.pretraining:PretrainData"
    checkpoint: str = "last.ckpt"
    needs_negatives: bool = True
    extra: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    retrieval: bool = False


@dataclass(frozen=True)
class Ablation:
    """A row of a paper's ablation table: a file `ablation/<name>.yaml` of the method's settings, or the method with EXTRA.

    Attributes:
        title: name of the row in the table.
        pretrains: whether the row has the method's pre-training stage.
        pretraining_of: row whose pre-training this row starts from, because the two differ in fine-tuning only.
        removes: argument of the captioner that the row switches off. A dataset without it has no such row.
        extra: value of EXTRA, for a row that pre-trains on more datasets.
    """

    title: str
    pretrains: bool = False
    pretraining_of: str | None = None
    removes: str | None = None
    extra: str = ""


@dataclass(frozen=True)
class DemoControl:
    """A baseline that `make demo METHOD=<method>` trains in addition to the method.

    Attributes:
        title: name of the row in the table.
        run: name of the run's folder.
        method: name of another method to train; None: the same method.
        finetune: fine-tuning steps; None: as many as the method.
        ablation: name of the ablation to train.
        steps_per_pretrain_step: additional fine-tuning steps for each pre-training step of the method, so that a baseline without
            pre-training is trained for the same time.
        adapted: whether the features are extracted by the CLIP that the method's pre-training has adapted.
    """

    title: str
    run: str
    method: str | None = None
    finetune: int | None = None
    ablation: str = ""
    steps_per_pretrain_step: float = 0.0
    adapted: bool = False


@dataclass(frozen=True)
class Demo:
    """How `make demo` trains a method.

    Attributes:
        finetune: fine-tuning steps in a demo of the default length, if the method has a core for the whole training time.
        pretrain: pre-training steps, likewise.
        share: fraction of a core's time, and of the steps, when all methods are trained; 0: only METHOD=<method> trains it.
        tiles_share: the same for WORLD=tiles.
        tiles_steps: factor of the numbers of steps for WORLD=tiles.
        controls: the baselines when the method is trained alone; by default its first ablation.
    """

    finetune: int = 5400
    pretrain: int = 1300
    share: float = 0.5
    tiles_share: float = 0.25
    tiles_steps: float = 0.4  # an image has more tokens than one of blocks
    controls: tuple[DemoControl, ...] = ()


@dataclass(frozen=True)
class Method:
    """A captioning system.

    Attributes:
        name: as in METHOD=scorer. title: as in tables. paper: citation, for model cards.
        captioner: import path of the `Captioner`.
        backbone: default settings of the features, a file of configs/backbone.
        reads_pixels: whether the captioner reads images instead of features.
        pixels_backbone: as `backbone`, for a method with two forms: if its setting `model.captioner.init_args.backbone` names a
            network, the captioner has this network as a part and reads images, else it reads features.
        base_model: whether it trains a vision-language model, which VLM= names.
        pretraining: its pre-training stage, if it has one.
        ablations: rows of `make ablation` by name, in the order of the paper's table.
        demo: how `make demo` trains it.
        importer: import path of the `Importer` of the authors' checkpoints.
        network: import path of the function that builds a backbone from a checkpoint of the method.
        configs: folder of the settings (<stage>.yaml, <stage>.<dataset>.yaml, ablation/), as "package:folder"; by default
            method/<name> in diffcap's own.
    """

    name: str
    title: str
    paper: str
    captioner: str
    backbone: str
    reads_pixels: bool = False
    pixels_backbone: str | None = None
    base_model: bool = False
    pretraining: Pretraining | None = None
    ablations: Mapping[str, Ablation] = field(default_factory=lambda: MappingProxyType({}))
    demo: Demo = Demo()
    importer: str | None = None
    network: str | None = None
    configs: str | None = None


BUILT_IN = (
    Method(
        name="pcl",
        title="IDC-PCL",
        paper="Yao, Wang and Jin, Image Difference Captioning with Pre-training and Contrastive Learning, AAAI 2022",
        captioner="diffcap.models.pcl:PCL",
        backbone="resnet101_layer4",
        pretraining=Pretraining(
            "diffcap.models.pcl_pretraining:PCLPretraining", extra={"cub": "captions", "nabirds": "classes"}
        ),
        ablations={
            "no_pretraining": Ablation("without pre-training"),
            "mlm": Ablation("MLM", pretrains=True),
            "mlm_mvcl": Ablation("MLM+MVCL", pretrains=True),
            "pcl": Ablation("MLM+MVCL+FDA", pretrains=True),
            "no_difference_encoder": Ablation("all, without difference encoder", pretrains=True),
            "no_distractor_judging": Ablation(
                "all, without distractor judging",
                pretrains=True,
                pretraining_of="pcl",
                removes="distractor_judging",
            ),
            "random_pair_init": Ablation("all, random pair encoder", pretrains=True),
            "cub": Ablation("all, +CUB", pretrains=True, extra="cub"),
            "nabirds": Ablation("all, +NABirds", pretrains=True, extra="nabirds"),
            "cub_nabirds": Ablation("all, +CUB +NABirds", pretrains=True, extra="cub,nabirds"),
        },
        demo=Demo(
            finetune=5760,
            share=1.0,
            tiles_share=0.5,
            controls=(DemoControl("the same without pre-training", "scratch", steps_per_pretrain_step=0.75),),
        ),
        importer="diffcap.interop.pcl:IMPORTER",
    ),
    Method(
        name="scorer",
        title="SCORER+CBR",
        paper="Tu, Li, Su, Zha, Yan and Huang, Self-supervised Cross-view Representation Reconstruction for Change Captioning, "
        "ICCV 2023",
        captioner="diffcap.models.scorer:SCORER",
        backbone="resnet101_layer3",
        ablations={
            "subtraction": Ablation("Subtraction"),
            "rr": Ablation("RR"),
            "rr_cbr": Ablation("RR+CBR"),
            "scorer": Ablation("SCORER"),
            "scorer_cbr": Ablation("SCORER+CBR"),
        },
        demo=Demo(tiles_share=0.5),
        importer="diffcap.interop.scorer:IMPORTER",
    ),
    Method(
        name="dirl",
        title="DIRL+CCR",
        paper="Tu et al., Distractors-Immune Representation Learning for Change Captioning, ECCV 2024",
        captioner="diffcap.models.dirl:DIRL",
        backbone="resnet101_layer3",
        ablations={
            "transformer": Ablation("Transformer"),
            "dirl": Ablation("DIRL"),
            "transformer_ccr": Ablation("Transformer+CCR"),
            "dirl_ccr": Ablation("DIRL+CCR"),
            "dirl_diagonal": Ablation("DIRL, diagonal term"),
            "dirl_off_diagonal": Ablation("DIRL, off-diagonal term"),
        },
        demo=Demo(tiles_share=0.5),
        importer="diffcap.interop.dirl:IMPORTER",
    ),
    Method(
        name="clip4idc",
        title="CLIP4IDC",
        paper="Guo, Wang and Laaksonen, CLIP4IDC: CLIP for Image Difference Captioning, AACL 2022",
        captioner="diffcap.models.clip4idc:CLIP4IDC",
        backbone="pixels",
        reads_pixels=True,
        pretraining=Pretraining(
            "diffcap.models.clip4idc:CLIP4IDCAdaptation",
            module="diffcap.lit.adaptation:Adaptation",
            data="diffcap.data.datamodules:AdaptData",
            checkpoint="best.ckpt",
            needs_negatives=False,
            retrieval=True,
        ),
        ablations={
            "ft1": Ablation("FT1"),
            "ft2": Ablation("FT2"),
            "unadapted": Ablation("CLIP4IDC without adaptation"),
            "clip4idc": Ablation("CLIP4IDC", pretrains=True),
        },
        demo=Demo(
            finetune=400,
            pretrain=300,
            share=0.0,
            tiles_share=0.0,
            tiles_steps=2.0,  # its images are harder to compare than those of blocks
            controls=(
                DemoControl("the same without adaptation", "unadapted", ablation="unadapted"),
                DemoControl("DIRL+CCR on CLIP4IDC's features", "cross", method="dirl", finetune=700, adapted=True),
            ),
        ),
        importer="diffcap.interop.clip4idc:IMPORTER",
        network="diffcap.features.clip4idc_backbone:build",
    ),
    Method(
        name="rsiccformer",
        title="RSICCformer",
        paper="Liu, Zhao, Chen, Zou and Shi, Remote Sensing Image Change Captioning With Dual-Branch Transformers: A New Method and a "
        "Large Scale Dataset, IEEE TGRS 2022",
        captioner="diffcap.models.rsiccformer:RSICCformer",
        backbone="resnet101_layer3_256",
        pixels_backbone="pixels_256",
        ablations={"one_layer": Ablation("one encoder layer"), "rsiccformer": Ablation("RSICCformer")},
        demo=Demo(share=0.0),
        importer="diffcap.interop.rsiccformer:IMPORTER",
    ),
    Method(
        name="chg2cap",
        title="Chg2Cap",
        paper="Chang and Ghamisi, Changes to Captions: An Attentive Network for Remote Sensing Change Captioning, IEEE TIP 2023",
        captioner="diffcap.models.chg2cap:Chg2Cap",
        backbone="resnet101_layer4_256",
        pixels_backbone="pixels_256",
        ablations={"one_layer": Ablation("one encoder layer"), "chg2cap": Ablation("Chg2Cap")},
        demo=Demo(share=0.0),
        importer="diffcap.interop.chg2cap:IMPORTER",
    ),
    Method(
        name="vlm",
        title="VLM",
        paper="an open vision-language model; see its own card",
        captioner="diffcap.models.vlm:VLM",
        backbone="files",
        reads_pixels=True,
        base_model=True,
        ablations={
            "lora": Ablation("LoRA"),
            "projector": Ablation("projector"),
            "all_weights": Ablation("all weights"),
            "difference": Ablation("LoRA and difference module"),
        },
        demo=Demo(share=0.0, tiles_share=0.0),
    ),
)


@cache
def methods() -> Mapping[str, Method]:
    """All methods by name: diffcap's own, then those of other packages.

    Raises:
        DiffcapError: a package's entry point cannot be loaded, is not a Method, or has the name of another method.
    """
    return MappingProxyType(load_plugins("diffcap.methods", Method, {method.name: method for method in BUILT_IN}))


def get_method(name: str, option: str = "METHOD") -> Method:
    """The method of a name.

    Raises:
        DiffcapError: it is unknown; the message names `option` and the known methods.
    """
    if name not in methods():
        raise DiffcapError(f"{option}={name} is unknown; known methods: {', '.join(methods())}.")
    return methods()[name]


def method_of(captioner: type) -> str:
    """The name of the method that a captioner's class belongs to.

    Raises:
        DiffcapError: no method has this class.
    """
    path = f"{captioner.__module__}:{captioner.__qualname__}"
    for name, method in methods().items():
        if method.captioner == path or import_object(method.captioner) is captioner:
            return name
    raise DiffcapError(
        f"{path} is the captioner of no registered method, so its checkpoints could not be loaded; register a "
        "diffcap.methods.Method with it as the entry point diffcap.methods of its package (see docs/adding.md)."
    )


def import_object(path: str) -> Any:
    """Import "package.module:Name".

    Raises:
        DiffcapError: the module or the name does not exist.
    """
    module, _, name = path.partition(":")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise DiffcapError(f"{path}: cannot be imported ({error}); correct the import path in the registry.") from error


def load_plugins(group: str, kind: type[T], known: dict[str, T]) -> dict[str, T]:
    """Add the entries that other packages register to the built-in ones.

    Args:
        group: of entry points. kind: class of an entry; it has a `name`. known: the built-in entries by name.

    Raises:
        DiffcapError: an entry point cannot be loaded, is not a `kind`, or has a name that is taken.
    """
    found = dict(known)
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
        name = getattr(entry, "name", "")
        if name in found:
            raise DiffcapError(f"{where}: the name {name!r} is taken already; choose another name in that package.")
        found[name] = entry
    return found
