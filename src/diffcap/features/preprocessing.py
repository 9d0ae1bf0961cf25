"""Preprocessing turns an image file into the input tensor of a backbone."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from diffcap.utils.errors import DiffcapError
from diffcap.utils.image_io import Source, ValueRange, read_image

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
# SCORER and DIRL use these values in their extraction scripts, from RobustChangeCaptioning (RCC). The last is probably an error for 0.225.
RCC_STD = (0.229, 0.224, 0.224)


def load_image(source: Source, name: str | None = None, value_range: ValueRange | None = None) -> Image.Image:
    """Decode an image to RGB. If it has more than 8 bits, `value_range` must be the (lowest, highest) value in both images of its pair."""
    loaded = read_image(source, name, value_range)
    if loaded.value_range and not value_range:  # `loaded.value_range` is None for images of 8 bits
        raise DiffcapError(
            f"{loaded.name}: has more than 8 bits, and the manifest has no range of values for both images of its pair; run `make data` "
            "again, without --check exists, and then `make extract`."
        )
    return loaded.image


@dataclass(frozen=True)
class ResizeOnly:
    """Resize the whole image with PIL's bicubic filter, without normalisation, as the code of CLIP4IDC's authors does."""

    size: tuple[int, int] = (224, 224)  # height and width in pixels; an image of this size is not changed

    def __call__(self, image: Image.Image) -> Tensor:
        """Turn an RGB image into (3, H, W) float32 with whole numbers from 0 to 255."""
        return self.pixels(image).float()

    def pixels(self, image: Image.Image) -> Tensor:
        """Turn an RGB image into (3, H, W) uint8."""
        from torchvision.transforms import v2  # too slow to import for --help

        resized = v2.functional.resize(image, list(self.size), v2.InterpolationMode.BICUBIC, antialias=True)
        return v2.functional.pil_to_tensor(resized)

    def describe(self) -> dict[str, Any]:
        """Return JSON values that identify the preprocessing."""
        return {"resize": "bicubic of PIL, whole image", **asdict(self)}


@dataclass(frozen=True)
class ShrinkLongestSide:
    """Shrink an image until no side is longer than `longest_side` pixels. Its aspect ratio is kept."""

    longest_side: int

    def __call__(self, image: Image.Image) -> Tensor:
        """Turn an RGB image into (3, H, W) float32 with whole numbers from 0 to 255."""
        from torchvision.transforms import v2  # too slow to import for --help

        image = image.copy()
        image.thumbnail((self.longest_side, self.longest_side), Image.Resampling.BICUBIC)
        return v2.functional.pil_to_tensor(image).float()

    def describe(self) -> dict[str, Any]:
        """Return JSON values that identify the preprocessing."""
        return asdict(self)


@dataclass(frozen=True)
class ResizeNormalize:
    """Resize the whole image and normalise it. The aspect ratio is not kept, because cropping could remove a change at the edge.

    Without antialias, the result is nearly that of OpenCV's cubic resize of 8-bit images, which SCORER and DIRL use (a = -0.75, rounded
    and clipped to 0 to 255): about one of 5,000 values differs by 1, because OpenCV rounds the weights of its kernel to 1/2048.
    """

    size: tuple[int, int] = (224, 224)  # height and width in pixels; an image of this size is not resized
    mean: tuple[float, float, float] = IMAGENET_MEAN  # of R, G, B on a scale from 0 to 1
    std: tuple[float, float, float] = IMAGENET_STD
    antialias: bool = False  # True: a wider kernel for downsampling, as PIL has (expected by CLIP and timm)

    def __call__(self, image: Image.Image) -> Tensor:
        """Turn an RGB image into (3, H, W) float32."""
        pixels = torch.from_numpy(np.array(image, dtype=np.uint8)).permute(2, 0, 1)  # (3, H, W)
        return self.normalize(self.resize(pixels[None]))[0]

    def resize(self, pixels: Tensor) -> Tensor:
        """Resize (B, 3, H, W) uint8 to (B, 3, *size) float32 with whole numbers from 0 to 255."""
        values = pixels.float()
        if values.shape[-2:] == self.size:
            return values
        values = F.interpolate(values, self.size, mode="bicubic", align_corners=False, antialias=self.antialias)
        return values.round().clamp(0, 255)

    def normalize(self, values: Tensor) -> Tensor:
        """Normalise (B, 3, H, W) with values from 0 to 255 by `mean` and `std`."""
        mean = values.new_tensor(self.mean).view(3, 1, 1)
        std = values.new_tensor(self.std).view(3, 1, 1)
        return (values / 255 - mean) / std

    def describe(self) -> dict[str, Any]:
        """Return JSON values that identify the preprocessing."""
        return {"resize": "bicubic, whole image", **asdict(self)}
