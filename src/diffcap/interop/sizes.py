"""Derive the hyperparameters of a model from the shapes of its official weights."""

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from diffcap.features.preprocessing import RCC_STD, ResizeNormalize, ResizeOnly

State = Mapping[str, Tensor]


class Sizes(NamedTuple):
    """What the weights determine."""

    model: dict[str, Any]  # constructor arguments of diffcap's model
    max_length: int  # maximal number of tokens of a caption
    features: dict[str, Any]  # metadata of the feature store
    finetune_only: tuple[str, ...] = ()  # arguments that the pre-training model does not have


def count_layers(state: State, pattern: str) -> int:
    """Count the layers whose number the first group of the pattern matches."""
    found = {int(match[1]) for name in state if (match := re.match(pattern, name))}
    if found and max(found) >= len(found):
        raise ValueError(f"there are {len(found)} layers, but one has the number {max(found)}")
    return len(found)


def resnet_features(
    layer: str,
    shape: tuple[int, int, int],
    preprocess: ResizeNormalize | None = None,
    pool: tuple[int, int] | None = None,
) -> dict[str, Any]:
    """Metadata of a store of ResNet-101's features; the authors name the weights (IMAGENET1K_V1) but publish no hash."""
    preprocess = preprocess or ResizeNormalize()
    return {
        "name": f"resnet101_{layer}",
        "library": "torchvision",
        "network": "resnet101",
        "stage": layer,
        "weights_sha256": None,
        "preprocessing": _as_json(preprocess.describe()),
        "pool": None if pool is None else list(pool),
        "shape": list(shape),
        "dtype": "float16",
    }


def pixel_features(size: tuple[int, int]) -> dict[str, Any]:
    """Metadata of a store of pixels; `size` is the images' height and width."""
    return {
        "name": "pixels",
        "library": "pixels",
        "network": None,
        "stage": None,
        "weights_sha256": None,
        "preprocessing": _as_json(ResizeOnly(size).describe()),
        "pool": None,
        "shape": [3, *size],
        "dtype": "uint8",
    }


def _as_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


def rcc_sizes(state: State, options: Mapping[str, Any], tables: State) -> Sizes:
    """Hyperparameters that the methods of the code base RobustChangeCaptioning share."""
    front, words = state["change_detector_state.img.0.weight"], state["speaker_state.core.embed.weight"]
    width, channels = front.shape[:2]
    coordinates = channels % 4 == 2 if options["coordinates"] is None else options["coordinates"]
    grid = [len(state[f"change_detector_state.{side}_embedding.weight"]) for side in "hw"]
    table = next((value for name, value in tables.items() if name.startswith("speaker_state.")), None)
    max_length = options["max_length"] or (24 if table is None else table.shape[-2])
    feature_channels = channels - 2 * coordinates
    model = {
        "vocabulary_size": len(words),
        "feature_channels": feature_channels,
        "grid": grid,
        "max_length": max_length,
        "width": width,
        "heads": options["heads"],
        "word_width": words.shape[1],
        "coordinates": coordinates,
        "decoder_layers": count_layers(state, r"speaker_state\.core\.layer\.(\d+)\."),
    }
    return Sizes(
        model, max_length, resnet_features("layer3", (feature_channels, grid[0], grid[1]), ResizeNormalize(std=RCC_STD))
    )
