"""Features of images that are in no store, equal to those of the extraction stage; for captioning new image pairs."""

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from diffcap.features.backbones import Backbone, build_backbone, libraries, preprocessing_of
from diffcap.features.preprocessing import ShrinkLongestSide
from diffcap.features.weights import OFFLINE_HINT, WEIGHTS, describe_clip
from diffcap.utils.errors import DiffcapError

_OPTION = "--backbone-weights"


def backbone_of(meta: Mapping[str, Any], weights: str | None = None) -> Backbone:
    """Build the backbone of a store's `meta`, which checkpoints have too; `weights`: a file instead of the library's default."""
    library: Any = meta.get("library")
    name = meta.get("network") or library
    if library not in libraries():
        raise DiffcapError(
            f"the captioner's features were computed by {library!r:.40}, not by a backbone of diffcap, so it cannot caption "
            "images; caption a feature store with `diffcap eval`."
        )
    if "longest_side" in (meta.get("preprocessing") or {}):  # a vision-language model, which reads images of any size
        return Backbone(
            torch.nn.Identity(), ShrinkLongestSide(meta["preprocessing"]["longest_side"]), {"library": library}
        )
    size = meta["preprocessing"].get("size") if library in ("pixels", "torchvision") else None
    std = meta["preprocessing"].get("std") if library == "torchvision" else None
    pool = meta.get("pool")
    try:
        backbone = build_backbone(
            library,
            _clip_name(meta) if library == "open_clip" and (weights or "tag" in meta) else meta.get("network"),
            meta.get("stage"),
            weights if weights is not None and library != "pixels" else "default",
            (pool[0], pool[1]) if pool else None,
            (size[0], size[1]) if size else None,
            (std[0], std[1], std[2]) if std else None,
        )
    except DiffcapError as error:  # its message has the variables of the extraction stage
        raise DiffcapError(str(error).replace(OFFLINE_HINT, "").replace(WEIGHTS, _OPTION)) from None
    described = json.loads(json.dumps(backbone.describe()))
    for key in ("preprocessing", "pool", "quick_gelu", "weights_sha256"):
        if key == "weights_sha256" and meta.get(key) is None:
            continue  # an imported captioner; the hash is unknown
        if described.get(key) != meta.get(key):
            what = {"weights_sha256": "other weights", "quick_gelu": "another activation"}.get(key, f"another {key}")
            raise DiffcapError(
                f"the captioner was trained on features of {name} with {what}; give the file of its backbone's weights as "
                f"{_OPTION} FILE, or use the version of diffcap that trained it."
            )
    return backbone


def _clip_name(meta: Mapping[str, Any]) -> str:
    """The network of a store of open_clip as NAME:TAG. A store of weights from a file may have no tag: any tag with its settings."""
    import open_clip

    name = meta["network"]
    tags = [meta["tag"]] if "tag" in meta else open_clip.list_pretrained_tags_by_model(name)
    for each in (f"{name}:{tag}" for tag in tags):
        preprocessing = json.loads(json.dumps(preprocessing_of("open_clip", each).describe()))
        if (describe_clip(each).get("quick_gelu"), preprocessing) == (meta.get("quick_gelu"), meta["preprocessing"]):
            return each
    return name


@torch.no_grad()
def features_of(backbone: Backbone, images: Tensor, meta: Mapping[str, Any]) -> Tensor:
    """Compute features of preprocessed images (B, 3, H, W) with the values and the type that a store would return.

    Returns:
        (B, C, h, w) float32, rounded to float16; uint8 for pixels.
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
