"""From a decoded picture to the tensor that a backbone takes."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Pixels:
    """Resize the whole picture to one size, PIL's bicubic (CLIP4IDC, authors' code), and leave its values as they are.

    Attributes:
        size: (height, width) in pixels; a picture of that size already is left as it is.
    """

    size: tuple[int, int] = (224, 224)

    def __call__(self, image: Image.Image) -> Tensor:
        """RGB picture to (3, H, W) float32, whole numbers 0 ... 255."""
        from torchvision.transforms import v2  # not for a stage's --help

        resized = v2.functional.resize(image, list(self.size), v2.InterpolationMode.BICUBIC, antialias=True)
        return v2.functional.pil_to_tensor(resized).float()

    def describe(self) -> dict[str, Any]:
        """JSON values that identify the preprocessing."""
        return {"resize": "bicubic of PIL, whole image", **asdict(self)}


@dataclass(frozen=True)
class ResizeNormalize:
    """Resize the whole picture to one size (aspect ratio not kept, nothing cropped: a change may stand at the edge).

    Without antialias this is OpenCV's cubic resize of 8-bit images, which SCORER and DIRL extract with: the same kernel
    (a = -0.75) and pixel centres, the result rounded and clipped to 0...255 before anything else. OpenCV rounds its
    weights to 1/2048, so about one value in 5,000 differs by 1.

    Attributes:
        size: (height, width) in pixels; a picture of that size already is left as it is.
        mean, std: of R, G, B on the scale 0...1.
        antialias: widen the kernel when shrinking, as PIL does (CLIP's and timm's weights were trained so).
    """

    size: tuple[int, int] = (224, 224)
    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD
    antialias: bool = False

    def __call__(self, image: Image.Image) -> Tensor:
        """RGB picture to (3, H, W) float32."""
        pixels = torch.from_numpy(np.array(image, dtype=np.uint8)).permute(2, 0, 1)  # (3, H, W)
        return self.normalize(self.resize(pixels[None]))[0]

    def resize(self, pixels: Tensor) -> Tensor:
        """(B, 3, H, W) uint8 to (B, 3, *size), float32 whole numbers 0...255."""
        values = pixels.float()
        if values.shape[-2:] == self.size:
            return values
        values = F.interpolate(values, self.size, mode="bicubic", align_corners=False, antialias=self.antialias)
        return values.round().clamp(0, 255)

    def normalize(self, values: Tensor) -> Tensor:
        """(B, 3, H, W) on the scale 0...255 to zero mean and unit variance by `mean` and `std`."""
        mean = values.new_tensor(self.mean).view(3, 1, 1)
        std = values.new_tensor(self.std).view(3, 1, 1)
        return (values / 255 - mean) / std

    def describe(self) -> dict[str, Any]:
        """JSON values that identify the preprocessing."""
        return {"resize": "bicubic, whole image", **asdict(self)}
