"""The datasets that diffcap knows, one `DatasetSpec` each; any other name is a user's own dataset (`diffcap.datasets.own`).

Readers are import paths of modules, so that this module imports none of them.

Another package adds its own datasets through the entry point group `diffcap.datasets`; see docs/adding.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Literal

from diffcap.datasets import no_change
from diffcap.registry import Method, load_plugins

SHIPPED_BACKBONES = ("blocks", "blocks_pixels", "tiles", "tiles_pixels")


@dataclass(frozen=True)
class LevirProtocol:
    """What the protocol `levir_cc` needs to know of a dataset, see `diffcap.evaluation.levir_cc`.

    Attributes:
        no_change: the sentences with which its captions say that nothing has changed; see `no_change.plain` for their form.
        min_count: how often a word must occur in all splits to have an id of its own.
        layout: of the vocabulary. It decides the numbers of the words, on which METEOR depends.
        accuracy_only: whether the dataset has only the accuracy, and no scores of ids and no S*m.
    """

    no_change: tuple[str, ...] = no_change.LEVIR_CC
    min_count: int = 6  # authors' code: RSICCformer, SEN, Change-Agent, RSCaMa; more than 5
    layout: Literal["rsicc", "chg2cap"] = "rsicc"
    accuracy_only: bool = False


@dataclass(frozen=True)
class DatasetSpec:
    """A dataset and its defaults.

    Attributes:
        name: as in DATASET=clevr_change. title: as in tables.
        reader: module with `read(folder)`, see `diffcap.datasets`.
        renderer: import path of the function that renders its files, for a dataset without official ones.
        pairs: whether it has pairs of images.
        backbone: features for methods that read features, if the method's default is not for this dataset.
        pixels_backbone: the same for methods that read pixels.
        network: import path of the function that builds the backbone of this dataset, see `features.blocks_backbone.build`.
        clip_backbone: replaces the backbone `pixels` (224 x 224, for CLIP), for a dataset with a small CLIP of its own.
        tagger: part-of-speech tagger of the hard negatives.
        configs: folder with <name>.yaml, settings that all training stages take on, as "package:folder"; by default dataset
            in diffcap's own.
        protocol: for the datasets that are also scored with the protocol `levir_cc`.
    """

    name: str
    title: str
    reader: str
    renderer: str | None = None
    pairs: bool = True
    backbone: str | None = None
    pixels_backbone: str | None = None
    clip_backbone: str | None = None
    network: str | None = None
    tagger: str = "english"
    configs: str | None = None
    protocol: LevirProtocol | None = None

    @property
    def rendered(self) -> bool:
        """Whether `make data` renders it instead of reading files."""
        return self.renderer is not None

    def features_note(self, *names: str | None) -> str:
        """A sentence if features are of a network that ships with diffcap, and the dataset is not the one it was trained for; else "".

        Args:
            names: of the features and their library.
        """
        own = (self.backbone, self.pixels_backbone, self.clip_backbone)
        poor = next((name for name in names if name in SHIPPED_BACKBONES and name not in own), None)
        if self.rendered or poor is None:
            return ""
        return (
            f"the features of {self.name} are of {poor}, a small network that was trained on rendered scenes; they are poor "
            "for other images, and so are the captions; without OFFLINE=yes and BACKBONE, the network of the method is used"
        )

    def backbone_for(self, method: Method, reads_pixels: bool) -> str:
        """Default backbone of a method on this dataset.

        Args:
            reads_pixels: whether the method reads images here, see `Experiment.reads_pixels`.
        """
        if reads_pixels:
            name = self.pixels_backbone or method.pixels_backbone or method.backbone
            return self.clip_backbone if self.clip_backbone and name == "pixels" else name
        return self.backbone or method.backbone


BUILT_IN = (
    DatasetSpec("birds2words", "Birds-to-Words", "diffcap.datasets.birds2words"),
    DatasetSpec(
        "blocks",
        "blocks",
        "diffcap.datasets.clevr_change",
        renderer="diffcap.worlds.blocks.write:write_blocks",
        backbone="blocks",
        pixels_backbone="blocks_pixels",
        network="diffcap.features.blocks_backbone:build",
        tagger="blocks",
    ),  # rendered in CLEVR-Change's official layout
    DatasetSpec("clevr_change", "CLEVR-Change", "diffcap.datasets.clevr_change"),
    DatasetSpec("clevr_dc", "CLEVR-DC", "diffcap.datasets.clevr_dc"),
    DatasetSpec("cub", "CUB captions", "diffcap.datasets.cub", pairs=False),
    DatasetSpec(
        "dubai_cc", "Dubai-CC", "diffcap.datasets.dubai_cc", protocol=LevirProtocol(no_change.DUBAI_CC, 1, "chg2cap")
    ),  # Chg2Cap: all words
    DatasetSpec("image_editing_request", "Image-Editing-Request", "diffcap.datasets.image_editing_request"),
    DatasetSpec("levir_cc", "LEVIR-CC", "diffcap.datasets.levir_cc", protocol=LevirProtocol()),
    DatasetSpec("levir_mci", "LEVIR-MCI", "diffcap.datasets.levir_mci", protocol=LevirProtocol()),
    DatasetSpec("nabirds", "NABirds", "diffcap.datasets.nabirds", pairs=False),
    DatasetSpec(
        "second_cc", "SECOND-CC", "diffcap.datasets.second_cc", protocol=LevirProtocol(no_change.SECOND_CC, 11)
    ),  # authors' code: more than 10
    DatasetSpec("spot_the_diff", "Spot-the-Diff", "diffcap.datasets.spot_the_diff"),
    DatasetSpec(
        "tiles",
        "tiles",
        "diffcap.datasets.tiles",
        renderer="diffcap.worlds.tiles.write:write_tiles",
        backbone="tiles",
        clip_backbone="tiles_pixels",
        network="diffcap.features.tiles_backbone:build",
        tagger="tiles",
        protocol=LevirProtocol(),
    ),  # rendered in LEVIR-CC's official layout
    DatasetSpec("whu_cdc", "WHU-CDC", "diffcap.datasets.whu_cdc", protocol=LevirProtocol()),
)
OWN_READER = "diffcap.datasets.own"  # of a user's own dataset


@cache
def datasets() -> Mapping[str, DatasetSpec]:
    """All datasets by name: diffcap's own, then those of other packages.

    Raises:
        DiffcapError: a package's entry point cannot be loaded, is not a DatasetSpec, or has the name of another dataset.
    """
    return MappingProxyType(load_plugins("diffcap.datasets", DatasetSpec, {spec.name: spec for spec in BUILT_IN}))


def get_dataset(name: str) -> DatasetSpec:
    """The dataset of a name; for an unknown name a user's own dataset."""
    return datasets().get(name) or DatasetSpec(name, name, OWN_READER)
