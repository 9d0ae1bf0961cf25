"""Features of single pictures, as the extraction stage makes them: what a captioner sees of two pictures that no store has."""

import json
from collections.abc import Mapping
from typing import Any, get_args

import torch
from torch import Tensor

from diffcap.errors import DiffcapError
from diffcap.features.backbones import Backbone, Library, build_backbone

_OPTION = "--backbone-weights"


def backbone_of(meta: Mapping[str, Any], weights: str | None = None) -> Backbone:
    """Build the backbone that made the features of a store.

    Args:
        meta: of the store, as checkpoints hold it. weights: file of its weights, None for the library's own ("default").

    Raises:
        DiffcapError: its weights cannot be had, or they are others than the captioner was trained on.
    """
    library: Any = meta.get("library")
    name = meta.get("network") or library
    if library not in get_args(Library):
        raise DiffcapError(
            f"the captioner's features were made by {library!r:.40}, not by a backbone of diffcap, so it cannot caption "
            "pictures; caption a feature store with stages/evaluate.py."
        )
    size = meta["preprocessing"]["size"] if library == "pixels" else None
    pool = meta.get("pool")
    try:
        backbone = build_backbone(
            library,
            meta.get("network"),
            meta.get("stage"),
            weights if weights is not None and library != "pixels" else "default",
            (pool[0], pool[1]) if pool else None,
            (size[0], size[1]) if size else None,
        )
    except DiffcapError as error:  # which names the option of extraction
        raise DiffcapError(str(error).replace("--model.weights", _OPTION)) from None
    described = json.loads(json.dumps(backbone.describe()))
    for key in ("preprocessing", "pool", "weights_sha256"):
        if key == "weights_sha256" and meta.get(key) is None:
            continue  # an imported captioner: nobody wrote down what it was trained on
        if described[key] != meta.get(key):
            what = "other weights" if key == "weights_sha256" else f"another {key}"
            raise DiffcapError(
                f"the features that the captioner was trained on were made with {what} of {name} than these; give the file "
                f"of the weights as {_OPTION} FILE, or use the diffcap that trained it."
            )
    return backbone


@torch.no_grad()
def features_of(backbone: Backbone, images: Tensor, meta: Mapping[str, Any]) -> Tensor:
    """Preprocessed images (B, 3, H, W) to features (B, C, h, w) as they come out of a store: float32 of float16, or uint8.

    Raises:
        DiffcapError: they have another shape than those that the captioner was trained on.
    """
    features = backbone(images)
    if list(features.shape[1:]) != list(meta["shape"]):
        raise DiffcapError(
            f"the features of {meta.get('network') or meta['library']} have shape {tuple(features.shape[1:])}, the captioner "
            f"was trained on {tuple(meta['shape'])}; give the backbone's own weights as {_OPTION} FILE."
        )
    if meta.get("dtype") == "uint8":
        return features.round().clamp(0, 255).to(torch.uint8)
    largest = torch.finfo(torch.float16).max
    return features.clamp(-largest, largest).half().float()
