"""The datasets that diffcap knows, one `DatasetSpec` each; any other name is a user's own dataset with a `pairs.jsonl`.

Readers are import paths of modules, so that this module imports none of them.

Another package adds its own datasets through the entry point group `diffcap.datasets`; see docs/adding.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

from diffcap.methods import Method, load_plugins


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
        tagger: part-of-speech tagger of the hard negatives.
        cub, nabirds: names of the datasets that EXTRA=cub and EXTRA=nabirds add.
        configs: folder with <name>.yaml, settings that all training stages take on, as "package:folder"; by default dataset
            in diffcap's own.
    """

    name: str
    title: str
    reader: str
    renderer: str | None = None
    pairs: bool = True
    backbone: str | None = None
    pixels_backbone: str | None = None
    tagger: str = "english"
    cub: str = "cub"
    nabirds: str = "nabirds"
    configs: str | None = None

    @property
    def rendered(self) -> bool:
        """Whether `make data` renders it instead of reading files."""
        return self.renderer is not None

    def backbone_for(self, method: Method) -> str:
        """Default backbone of a method on this dataset."""
        return (self.pixels_backbone if method.reads_pixels else self.backbone) or method.backbone


def _blocks(name: str, title: str, reader: str, renderer: str, pairs: bool) -> DatasetSpec:
    return DatasetSpec(
        name,
        title,
        f"diffcap.datasets.{reader}",
        renderer=f"diffcap.datasets.blocks.{renderer}",
        pairs=pairs,
        backbone="blocks",
        pixels_backbone="blocks_pixels",
        tagger="blocks",
        cub="blocks_cub",
        nabirds="blocks_nabirds",
    )


BUILT_IN = (
    DatasetSpec("birds2words", "Birds-to-Words", "diffcap.datasets.birds2words"),
    _blocks(
        "blocks", "blocks", "clevr_change", "write:write_blocks", pairs=True
    ),  # rendered in CLEVR-Change's official layout
    _blocks("blocks_cub", "blocks, stand-in for CUB", "cub", "singles:write_cub", pairs=False),
    _blocks("blocks_nabirds", "blocks, stand-in for NABirds", "nabirds", "singles:write_nabirds", pairs=False),
    DatasetSpec("clevr_change", "CLEVR-Change", "diffcap.datasets.clevr_change"),
    DatasetSpec("clevr_dc", "CLEVR-DC", "diffcap.datasets.clevr_dc"),
    DatasetSpec("cub", "CUB captions", "diffcap.datasets.cub", pairs=False),
    DatasetSpec("image_editing_request", "Image-Editing-Request", "diffcap.datasets.image_editing_request"),
    DatasetSpec("nabirds", "NABirds", "diffcap.datasets.nabirds", pairs=False),
    DatasetSpec("spot_the_diff", "Spot-the-Diff", "diffcap.datasets.spot_the_diff"),
)
OWN_READER = "diffcap.datasets.pairs"  # of a user's own dataset


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
