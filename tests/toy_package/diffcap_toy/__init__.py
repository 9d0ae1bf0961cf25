"""A package that adds a method and a dataset to diffcap, as docs/adding.md describes it."""

from diffcap.datasets.registry import DatasetSpec
from diffcap.methods import Ablation, Method

METHOD = Method(
    name="gru",
    title="GRU on the difference",
    paper="an example of diffcap's documentation",
    captioner="diffcap_toy.gru:GRU",
    backbone="resnet101_layer4",
    ablations={"after_only": Ablation("the second image alone"), "gru": Ablation("the difference")},
    configs="diffcap_toy:configs/method",
)
DATASET = DatasetSpec(
    name="shapes",
    title="Shapes",
    reader="diffcap_toy.shapes",
    backbone="blocks",
    configs="diffcap_toy:configs/dataset",
)
