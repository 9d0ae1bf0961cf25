"""A ResNet as part of a captioner. It maps pixels to a feature map; some of its layers are trained, the others are frozen.

Letters: B images, C feature channels, h and w rows and columns of the map.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffcap.features.weights import download, load_weights, read_state_dict
from diffcap.losses.gather import sum_over_ranks, world_size
from diffcap.models.layers import check_shape

RESNET_LAYERS = ("layer1", "layer2", "layer3", "layer4")
Normalization = Literal["imagenet", "levir_cc", "dubai_cc"]
BatchNormMode = Literal["eval", "train"]
# Mean and standard deviation of R, G and B on the scale 0 ... 255; for LEVIR-CC and Dubai-CC those of Chg2Cap's code.
_NORMALIZATIONS: dict[Normalization, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "imagenet": ((123.675, 116.28, 103.53), (58.395, 57.12, 57.375)),
    "levir_cc": ((100.6790, 99.5023, 84.9932), (50.9820, 48.4838, 44.7057)),
    "dubai_cc": ((156.0681, 115.0891, 92.0745), (76.5139, 52.0616, 44.4209)),
}


class GlobalBatchNorm2d(nn.BatchNorm2d):
    """`nn.BatchNorm2d` that in training computes its statistics over the images of all ranks.

    The result of a training then does not depend on the number of processes. torch's SyncBatchNorm does the same, but only on accelerators.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x (B, C, h, w); B may differ between ranks."""
        if not self.training or world_size() == 1:
            return super().forward(x)
        assert self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None
        # Subtract the running mean, which is equal on all ranks, so that the squares lose few digits if the mean is large.
        shift = self.running_mean.clone()
        centred = x.float() - shift[:, None, None]
        own_num_values = centred.new_full((1,), centred.numel() / centred.shape[1])  # per channel
        own_sums = centred.sum((0, 2, 3)), centred.square().sum((0, 2, 3))  # (C,) each
        sums = sum_over_ranks(torch.cat([*own_sums, own_num_values]))  # (2 C + 1,)
        num_values = sums[-1].detach()
        mean, mean_square = (sums[:-1] / num_values).chunk(2)
        variance = mean_square - mean.square()
        with torch.no_grad():
            self.num_batches_tracked += 1
            assert self.momentum is not None
            self.running_mean.lerp_(mean + shift, self.momentum)
            self.running_var.lerp_(variance * num_values / (num_values - 1), self.momentum)
        scale = self.weight * (variance + self.eps).rsqrt()
        scaled = (centred - mean[:, None, None]) * scale[:, None, None]
        return (scaled + self.bias[:, None, None]).to(x.dtype)


class ResNetEncoder(nn.Module):
    """The layers of a torchvision ResNet up to `layer`, with random weights; `load` loads pretrained weights.

    Args:
        network: torchvision's name ("resnet101"). layer: the last layer ("layer4"), whose output is the map.
        image_size: height and width of the images in pixels. normalization: dataset whose pixel mean and deviation are used.
        trained_layers: layers whose weights are trained; conv1, bn1 and the other layers are frozen.
        batch_norm: mode of the frozen part while the captioner is in training mode. "eval": it uses the running statistics, which
            do not change. "train": it uses the statistics of each batch and updates the running ones (code of RSICCformer's authors).
        pool: rows and columns of an adaptive average pooling of the map; None: no pooling.
        resize: height and width to which normalised images are resized, bilinear with aligned corners (Chg2Cap's code enlarges
            Dubai-CC's 50 x 50 pixels to 256 x 256); None: no resizing.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        network: str,
        layer: str,
        image_size: Sequence[int],
        normalization: Normalization = "imagenet",
        trained_layers: Sequence[str] = (),
        batch_norm: BatchNormMode = "eval",
        pool: Sequence[int] | None = None,
        resize: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        from torchvision import models  # too slow to import for --help

        build_network = models.get_model_builder(network)
        if build_network.__module__ != models.resnet.__name__:
            raise ValueError(f"{network} is not a ResNet; choose one such as resnet101")
        self.name = network
        self.network: Any = build_network(weights=None, norm_layer=GlobalBatchNorm2d)
        used_layers = RESNET_LAYERS[: RESNET_LAYERS.index(layer) + 1]
        if unknown := [name for name in trained_layers if name not in used_layers]:
            raise ValueError(f"trained_layers has {unknown[0]!r}; choose from {', '.join(used_layers)}")
        self.channels: int = 64 * 2 ** (len(used_layers) - 1) * self.network.layer1[0].expansion
        for name in ("avgpool", "fc", *RESNET_LAYERS[len(used_layers) :]):
            delattr(self.network, name)
        self.layers = used_layers
        self.frozen_parts = ["conv1", "bn1", *(name for name in used_layers if name not in trained_layers)]
        for name in self.frozen_parts:
            getattr(self.network, name).requires_grad_(False)
        self.batch_norm = batch_norm
        self.image_size = tuple(image_size)
        self.pool = (pool[0], pool[1]) if pool else None
        self.resize = (resize[0], resize[1]) if resize else None
        stride = 2 ** (len(used_layers) + 1)
        rows, columns = pool or [math.ceil(side / stride) for side in resize or image_size]
        self.grid = rows, columns  # of the feature map
        for name, values in zip(("mean", "std"), _NORMALIZATIONS[normalization]):
            self.register_buffer(name, torch.tensor(values).view(3, 1, 1), persistent=False)
        self.train()  # Lightning trains each module in the mode (train or eval) that the module has at the beginning

    def train(self, mode: bool = True) -> "ResNetEncoder":
        """Set training or evaluation mode. The frozen part stays in evaluation mode unless `batch_norm` is "train"."""
        super().train(mode)
        if self.batch_norm == "eval":
            for name in self.frozen_parts:
                getattr(self.network, name).eval()
        return self

    def forward(self, pixels: Tensor) -> Tensor:
        """Compute feature maps (B, C, h, w) of pixels 0 ... 255, (B, 3, height, width) of any type."""
        check_shape("images", pixels, 3, *self.image_size)
        x = (pixels.to(self.mean.dtype) - self.mean) / self.std
        if self.resize:
            x = F.interpolate(x, self.resize, mode="bilinear", align_corners=True)
        network = self.network
        x = network.maxpool(network.relu(network.bn1(network.conv1(x))))
        for name in self.layers:
            x = getattr(network, name)(x)
        return F.adaptive_avg_pool2d(x, self.pool) if self.pool else x

    def load(self, weights: str) -> None:
        """Load weights; those of the classifier and of layers that this network does not have are ignored.

        Args:
            weights: "default" (torchvision's IMAGENET1K_V1, downloaded, as in the authors' code of RSICCformer and Chg2Cap),
                "random" (the initial values are kept), or a file of a state dict with torchvision's names.
        """
        if weights == "random":
            return
        if weights == "default":
            from torchvision import models

            imagenet = models.get_model_weights(self.name)["IMAGENET1K_V1"]
            state = download(self.name, imagenet.url, lambda: imagenet.get_state_dict(progress=True))
        else:
            state = read_state_dict(weights)
        load_weights(self.network, state, weights)
