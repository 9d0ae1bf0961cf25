"""Loading of pretrained weights into the ResNet of a captioner that reads pixels (RSICCformer, Chg2Cap)."""

from diffcap.features.weights import download, load_weights, read_state_dict
from diffcap.models.resnet import ResNetEncoder


def load_resnet(images: ResNetEncoder, weights: str) -> None:
    """Load weights into a ResNet; those of its classifier and of layers that it does not have are ignored.

    Args:
        weights: "default" (torchvision's IMAGENET1K_V1, which both systems start from; it is downloaded), "random" (the initial
            values are kept), or a file of a state dict with torchvision's names.
    """
    if weights == "random":
        return
    if weights == "default":
        from torchvision import models  # too slow to import for --help

        choice = models.get_model_weights(images.name)["IMAGENET1K_V1"]
        state = download(images.name, choice.url, lambda: choice.get_state_dict(progress=True))
    else:
        state = read_state_dict(weights)
    load_weights(images.network, state, weights)
