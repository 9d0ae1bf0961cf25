"""Resizing against a naive bicubic loop with OpenCV's conventions."""

import math

import numpy as np
import torch
from PIL import Image

from diffcap.features.preprocessing import IMAGENET_MEAN, IMAGENET_STD, ResizeNormalize


def kernel(distance: float, a: float = -0.75) -> float:
    """Keys' cubic kernel with the constant that OpenCV uses."""
    t = abs(distance)
    if t <= 1:
        return (a + 2) * t**3 - (a + 3) * t**2 + 1
    return a * t**3 - 5 * a * t**2 + 8 * a * t - 4 * a if t < 2 else 0.0


def naive_cubic(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    """cv2.resize(..., INTER_CUBIC): four neighbours each way, the edge repeated, no widening when shrinking."""
    out = np.zeros((height, width, 3))
    for i in range(height):
        y = (i + 0.5) * pixels.shape[0] / height - 0.5
        for j in range(width):
            x = (j + 0.5) * pixels.shape[1] / width - 0.5
            for m in range(math.floor(y) - 1, math.floor(y) + 3):
                for n in range(math.floor(x) - 1, math.floor(x) + 3):
                    value = pixels[min(max(m, 0), pixels.shape[0] - 1), min(max(n, 0), pixels.shape[1] - 1)]
                    out[i, j] += kernel(y - m) * kernel(x - n) * value
    return np.clip(np.round(out), 0, 255)


def test_resize_is_the_naive_cubic_one() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (20, 31, 3), dtype=np.uint8)
    for size in ((12, 14), (29, 33)):  # down without antialias, and up
        resized = ResizeNormalize(size).resize(torch.from_numpy(pixels).permute(2, 0, 1)[None])
        difference = resized[0].permute(1, 2, 0).numpy() - naive_cubic(pixels, *size)
        # float32 against float64: a value on the border of two whole numbers may round the other way
        assert np.abs(difference).max() <= 1 and (difference != 0).mean() < 0.002


def test_statistics_and_size() -> None:
    image = Image.fromarray(np.full((10, 30, 3), 128, dtype=np.uint8))
    tensor = ResizeNormalize()(image)
    assert tensor.shape == (3, 224, 224)
    expected = [(128 / 255 - mean) / std for mean, std in zip(IMAGENET_MEAN, IMAGENET_STD)]
    torch.testing.assert_close(tensor.mean((1, 2)), torch.tensor(expected))
