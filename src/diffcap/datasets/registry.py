"""The built-in datasets, each described by a `DatasetSpec`. Any other name is a user's own dataset, read by `diffcap.datasets.pairs`.

Functions are given as import paths ("package.module:function"), so that this module does not import the readers. Another package adds
datasets through the entry point group `diffcap.datasets`, as docs/adding.md describes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import ClassVar, Literal

from diffcap.datasets import no_change
from diffcap.registry import Method, load_plugins

RELEASED_CHECKPOINTS_DATASET = "clevr_change"  # most methods' authors released checkpoints for this dataset
ProtocolName = Literal["text", "levir_cc"]  # how captions are scored: as texts, or as ids of words


@dataclass(frozen=True)
class WordIdProtocol:
    """Settings of the scoring `levir_cc`, which compares ids of words, not texts (`diffcap.evaluation.remote_sensing`)."""

    name: ClassVar[ProtocolName] = "levir_cc"
    no_change: tuple[str, ...] = no_change.LEVIR_CC  # the sentences of pairs without change, without final full stops
    # A word gets its own id if it occurs at least this often in all splits. RSICCformer, SEN, Change-Agent and RSCaMa require more than 5.
    min_count: int = 6
    layout: Literal["rsicc", "chg2cap"] = "rsicc"  # method that defines the order of word ids; METEOR depends on it
    accuracy_only: bool = False  # True: only the accuracy of change or no change; no word-id metrics and no S*m


@dataclass(frozen=True)
class DatasetSpec:
    """A dataset and its defaults."""

    name: str  # name in commands and configurations, such as "clevr_change"
    title: str  # name in tables, such as "CLEVR-Change"
    reader: str  # import path of `read(folder)`, which returns all pairs
    notes: str | None = None  # import path of `notes(pairs)`: remarks that the data stage prints and stores
    photo_urls: str | None = None  # import path of `photo_urls(folder)`: image path -> URLs of the image
    info: Mapping[str, str] = field(default_factory=dict)  # further entries of `dataset.json`, a file of the data stage
    blank_captions: bool = False  # True if the authors' files have empty captions, which papers score, too
    augmented: bool = False  # True if `read` has an option `augmented` that keeps augmented training pairs
    renderer: str | None = None  # import path of the function that renders the dataset; None for a published dataset
    # Import path of a function (folder of the rendered files, pairs): id -> sentences by one who knows the change, in the words of the
    # references, but sampled with other seeds; {} if another version rendered the folder.
    oracle: str | None = None
    pairs: bool = True  # False for a dataset of single images
    backbone: str | None = None  # replaces the default backbone (network of the features) of methods that read features
    pixels_backbone: str | None = None  # replaces the default backbone of methods that read pixels
    clip_backbone: str | None = None  # replaces the backbone `pixels` (224 x 224) by smaller images, for a small CLIP
    network: str | None = None  # import path of the function that builds the network of `backbone`
    tokenizer: Literal["ptb", "raw"] = "ptb"  # for the scores of imported checkpoints; "raw" splits at spaces
    tagger: str = "english"  # name of the part-of-speech tagger that hard negatives (wrong captions) need
    # "package:folder" in which <name>.yaml has settings for all training stages. None: the folder configs/dataset of diffcap.
    configs: str | None = None
    protocol: WordIdProtocol | None = None  # None if the dataset is not scored by `levir_cc`

    @property
    def rendered(self) -> bool:
        """True if `make data` renders the dataset, and False if `make data` reads files that the user has."""
        return self.renderer is not None

    @property
    def backbones(self) -> frozenset[str | None]:
        """The backbones that replace a method's default backbone on this dataset."""
        return frozenset((self.backbone, self.pixels_backbone, self.clip_backbone))

    def features_note(self, *names: str | None) -> str:
        """Return a warning if one of the backbones `names` ships with diffcap for another dataset, else ""."""
        foreign_backbone = next((name for name in names if name in SHIPPED_BACKBONES - self.backbones), None)
        if self.rendered or foreign_backbone is None:
            return ""
        return (
            f"the features of {self.name} are of {foreign_backbone}, a small network that was trained on rendered scenes; they are poor "
            "for other images, and so are the captions; without OFFLINE=yes and BACKBONE, the network of the method is used"
        )

    def backbone_for(self, method: Method, reads_pixels: bool) -> str:
        """Return a method's backbone on this dataset. `reads_pixels` is True if the method reads images instead of features."""
        if reads_pixels:
            name = self.pixels_backbone or method.pixels_backbone or method.backbone
            return self.clip_backbone if self.clip_backbone and name == "pixels" else name
        return self.backbone or method.backbone


_DERIVED_TYPES_INFO = {"change_types": "derived from the captions"}  # printed with the scores of each change type
BUILT_IN = (
    DatasetSpec(
        "birds2words",
        "Birds-to-Words",
        "diffcap.datasets.photos:read_birds2words",
        photo_urls="diffcap.datasets.photos:photo_urls",
        tokenizer="raw",
    ),
    DatasetSpec(
        "blocks",
        "blocks",
        "diffcap.datasets.clevr:read_clevr_change",  # blocks has the files of CLEVR-Change
        renderer="diffcap.worlds.blocks.write:write_blocks",
        oracle="diffcap.worlds.blocks.write:oracle_captions",
        backbone="blocks",
        pixels_backbone="blocks_pixels",
        network="diffcap.features.blocks_backbone:build",
        tagger="blocks",
    ),
    DatasetSpec("clevr_change", "CLEVR-Change", "diffcap.datasets.clevr:read_clevr_change"),
    DatasetSpec(
        "clevr_dc",
        "CLEVR-DC",
        "diffcap.datasets.clevr:read_clevr_dc",
        notes="diffcap.datasets.clevr:clevr_dc_notes",
        info=_DERIVED_TYPES_INFO,
    ),
    DatasetSpec("cub", "CUB captions", "diffcap.datasets.single_images:read_cub", pairs=False),
    DatasetSpec(
        "dubai_cc",
        "Dubai-CC",
        "diffcap.datasets.karpathy:read_dubai_cc",
        info=_DERIVED_TYPES_INFO,
        protocol=WordIdProtocol(no_change.DUBAI_CC, 1, "chg2cap"),  # Chg2Cap gives each word an id
    ),
    DatasetSpec("image_editing_request", "Image-Editing-Request", "diffcap.datasets.photos:read_image_editing_request"),
    DatasetSpec("levir_cc", "LEVIR-CC", "diffcap.datasets.karpathy:read_levir_cc", protocol=WordIdProtocol()),
    DatasetSpec("levir_mci", "LEVIR-MCI", "diffcap.datasets.karpathy:read_levir_mci", protocol=WordIdProtocol()),
    DatasetSpec("nabirds", "NABirds", "diffcap.datasets.single_images:read_nabirds", pairs=False),
    DatasetSpec(
        "second_cc",
        "SECOND-CC",
        "diffcap.datasets.karpathy:read_second_cc",
        augmented=True,
        protocol=WordIdProtocol(no_change.SECOND_CC, 11),  # the authors' code requires more than 10
    ),
    DatasetSpec(
        "spot_the_diff",
        "Spot-the-Diff",
        "diffcap.datasets.photos:read_spot_the_diff",
        notes="diffcap.datasets.photos:spot_the_diff_notes",
        info={"changes": "single"},  # by default, each sentence is a caption
        blank_captions=True,  # 7 of the 1,270 test pairs have only blank captions
    ),
    DatasetSpec(
        "tiles",
        "tiles",
        "diffcap.datasets.karpathy:read_tiles",  # tiles has the files of LEVIR-MCI
        renderer="diffcap.worlds.tiles.write:write_tiles",
        oracle="diffcap.worlds.tiles.write:oracle_captions",
        backbone="tiles",
        clip_backbone="tiles_pixels",
        network="diffcap.features.tiles_backbone:build",
        tagger="tiles",
        protocol=WordIdProtocol(),
    ),
    DatasetSpec("whu_cdc", "WHU-CDC", "diffcap.datasets.karpathy:read_whu_cdc", protocol=WordIdProtocol()),
)
SHIPPED_BACKBONES = frozenset(name for spec in BUILT_IN if spec.rendered for name in spec.backbones if name)
OWN_READER = "diffcap.datasets.pairs:read"  # reads a user's own dataset


@cache
def datasets() -> Mapping[str, DatasetSpec]:
    """Return all datasets by name: the built-in datasets, then the datasets of other packages."""
    return MappingProxyType(load_plugins("diffcap.datasets", DatasetSpec, {spec.name: spec for spec in BUILT_IN}))


def get_dataset(name: str) -> DatasetSpec:
    """Return the `DatasetSpec` of a name. An unknown name is the name of a user's own dataset."""
    return datasets().get(name) or DatasetSpec(name, name, OWN_READER, "diffcap.datasets.pairs:notes")
