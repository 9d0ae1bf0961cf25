"""Backbones: frozen networks of several libraries. They compute a feature map of one image, for a feature store or a new caption.

| library | `network` | layer (option `stage`) | default weights |
|---|---|---|---|
| `torchvision` | name of a classifier | name of a node, such as `layer3` (required) | `IMAGENET1K_V1` |
| `open_clip` | `NAME` or `NAME:TAG` | number of a block; null: the last | those of TAG; default TAG: `openai`, else the first tag |
| `timm` | name of a model | number of a block; null: the last | those of the tag in the name |
| `pixels` | null | null | none; the features are the image itself, resized to `image_size` and stored as uint8 |
| name of a dataset with a network | null | null | those that ship with the package |
| name of a method with a network | null | null | none; `weights` must be a checkpoint of the method |

`resnet101` gives 1024 x 14 x 14 at `layer3` and 2048 x 7 x 7 at `layer4`.
The activation, mean and standard deviation are always those of the default weights, even if `weights` is a file or "random".
An image is always resized as a whole, by diffcap's `ResizeNormalize` and not by the library's preprocessing, which may crop it.
`configs/backbones.yaml` has named choices.
"""

import json
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from diffcap.datasets.registry import datasets
from diffcap.features.preprocessing import ResizeNormalize, ResizeOnly, ShrinkLongestSide
from diffcap.features.weights import (
    OFFLINE_HINT,
    WEIGHTS_VARIABLE,
    describe_clip,
    download,
    find_clip_weights,
    load_pretrained_clip,
    load_weights,
    read_state_dict,
    state_hash,
)
from diffcap.registry import import_object, methods
from diffcap.utils.errors import DiffcapError

_WEIGHTS_OPTION = "--backbone-weights"  # option of the commands that caption images, for the weights file of a backbone


@cache
def own_builders() -> dict[str, str]:
    """Return the datasets and methods that bring their own network: name -> import path of the function that builds the network."""
    builders = {name: dataset.network for name, dataset in datasets().items()}
    builders |= {name: method.network for name, method in methods().items()}
    return {name: import_path for name, import_path in builders.items() if import_path}


def library_names() -> tuple[str, ...]:
    """Return the names in the table's column "library"."""
    return ("torchvision", "open_clip", "timm", *own_builders(), "pixels")


class Backbone(nn.Module):
    """A frozen network and its preprocessing.

    Args:
        trunk: network that turns preprocessed images (B, 3, H, W) into a feature map (B, C, h, w).
        preprocess: turns an RGB image into (3, H, W) float32: normalised, or whole numbers from 0 to 255 for `pixels`.
        description: JSON values that identify the network, such as its library, name and layer.
        pool_size: size (h, w) to which average pooling reduces the map; None for no pooling.
    """

    def __init__(
        self,
        trunk: nn.Module,
        preprocess: ResizeNormalize | ResizeOnly | ShrinkLongestSide,
        description: dict[str, Any],
        pool_size: tuple[int, int] | None = None,
    ) -> None:
        super().__init__()
        self.trunk = trunk.eval().requires_grad_(False)
        self.preprocess = preprocess
        self._description = description
        self.pool_size = pool_size

    def forward(self, images: Tensor) -> Tensor:
        """Turn preprocessed images (B, 3, H, W) into features (B, C, h, w)."""
        features = self.trunk(images)
        return F.adaptive_avg_pool2d(features, self.pool_size) if self.pool_size else features

    def describe(self) -> dict[str, Any]:
        """Return JSON values, which are equal for two backbones if, and only if, the backbones compute equal features."""
        return {
            **self._description,
            "weights_sha256": state_hash(self.trunk),
            "preprocessing": self.preprocess.describe(),
            "pool": self.pool_size,
        }

    @torch.no_grad()
    def shape(self) -> tuple[int, int, int]:
        """Return the shape (C, h, w) of one image's features, measured with a blank image."""
        features = self.trunk(self.preprocess(Image.new("RGB", (8, 8)))[None])
        if not isinstance(features, Tensor) or features.ndim != 4:
            output = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
            raise DiffcapError(
                f"--model.stage={self._description.get('stage')} of {self._description.get('network')} gives {output}, not "
                "a map (1, C, h, w); choose an earlier layer."
            )
        channels, rows, columns = features.shape[1:]
        return (channels, *(self.pool_size or (rows, columns)))


def build_backbone(
    library: str,
    network: str | None = None,
    layer: str | int | None = None,
    weights: str = "default",
    pool_size: tuple[int, int] | None = None,
    image_size: tuple[int, int] | None = None,
    image_std: tuple[float, float, float] | None = None,
    norm: bool = False,
) -> Backbone:
    """Build a backbone. `layer` is the option `stage` of `make extract`, and `pool_size` is its option `pool`.

    Args:
        library, network, layer: as in the table at the top; the layer's output is the feature map.
        weights: "default" (downloaded by the library), "random" (seed 0, for tests), or the path of a weights file.
        pool_size: rows and columns of the map after average pooling; None for no pooling.
        image_size: height and width of `pixels` and of the input of a torchvision or timm network; by default (224, 224), and for timm
            the size that its weights were trained with. Position embeddings of another size are resampled.
        image_std: standard deviations of R, G, B on a scale from 0 to 1 for a torchvision network; by default those of its weights.
        norm: apply the last norm of a timm network to the map, as open_clip's networks always do.
    """
    if library not in library_names():
        names = ", ".join(library_names())
        raise DiffcapError(f"The library {library} of the backbone is unknown; choose one of {names}.")
    for option, value, libraries in (
        ("image_size", image_size, ("pixels", "torchvision", "timm")),
        ("image_std", image_std, ("torchvision",)),
        ("norm", norm or None, ("timm",)),
    ):
        if value is not None and library not in libraries:
            raise DiffcapError(f"--model.{option} is only for {', '.join(libraries)}, not for {library}: remove it.")
    size = None if image_size is None else (*image_size,)  # a tuple, even if the caller gave a list
    if library == "pixels":
        if weights != "default" or network is not None or layer is not None or pool_size is not None:
            raise DiffcapError(
                "pixels have no network, stage, pool or weights: remove these options; a captioner of pixels gets its weights in "
                "training, as WEIGHTS=FILE."
            )
        return Backbone(nn.Identity(), ResizeOnly(size or (224, 224)), {"library": library, "dtype": "uint8"})
    if library not in own_builders() and not network:
        raise DiffcapError(f"--model.network is missing: give the name of a network of {library}.")
    name = network or ""  # "" for the network of a dataset or method
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the libraries warn about weights that are replaced below
        torch.manual_seed(0)  # the same "random" weights on every rank and in every run
        if library in own_builders():
            trunk, preprocess = import_object(own_builders()[library])(weights)
        else:
            preprocess = find_preprocessing(library, name)
            build_timm = partial(_build_timm, norm=norm, is_resized=size not in (None, preprocess.size))
            build: Any = {"torchvision": _build_torchvision, "open_clip": _build_open_clip, "timm": build_timm}[library]
            trunk = build(name, layer, weights)
    if size is not None:
        preprocess = replace(preprocess, size=size)
    if image_std is not None:
        preprocess = replace(preprocess, std=(*image_std,))
    description = {"library": library, "network": network, "stage": layer}
    if library == "open_clip":
        description |= describe_clip(name)
    if norm:
        description["norm"] = True
    return Backbone(trunk, preprocess, description, (*pool_size,) if pool_size else None)


def find_preprocessing(library: str, network: str) -> ResizeNormalize:
    """Return the preprocessing for a network's default weights. It comes from the library's metadata; the network is not built."""
    if library == "torchvision":
        if network in _NETWORKS_THAT_RESCALE:
            return ResizeNormalize(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
        transforms = _torchvision_weights(network).transforms()
        return ResizeNormalize(mean=tuple(transforms.mean), std=tuple(transforms.std))
    if library == "open_clip":
        import open_clip

        name, _, settings = find_clip_weights(network)
        settings = settings or {"mean": open_clip.OPENAI_DATASET_MEAN, "std": open_clip.OPENAI_DATASET_STD}
        size = open_clip.get_model_config(name)["vision_cfg"]["image_size"]
        height, width = size if isinstance(size, list | tuple) else (size, size)
    else:
        from timm.data import resolve_data_config

        settings = resolve_data_config(pretrained_cfg=_timm_settings(network))
        _, height, width = settings["input_size"]
    return ResizeNormalize((height, width), tuple(settings["mean"]), tuple(settings["std"]), antialias=True)


# With torchvision's own weights, these networks rescale their input to -1 ... 1. In diffcap, the preprocessing does this.
_NETWORKS_THAT_RESCALE = ("googlenet", "inception_v3")


def _torchvision_weights(network: str) -> Any:
    """Return the default weights of a classifier, a member of one of torchvision's enumerations."""
    from torchvision import models

    if network not in models.list_models(module=models):
        raise DiffcapError(f"torchvision has no classifier {network!r}; `torchvision.models.list_models()` lists them.")
    # SCORER and DIRL used the weights V1; torchvision's `DEFAULT` is V2 now. Only vit_h_14 and regnet_y_128gf have no V1.
    members = models.get_model_weights(network).__members__
    return members.get("IMAGENET1K_V1") or members["IMAGENET1K_SWAG_LINEAR_V1"]


def _build_torchvision(network: str, layer: str | int | None, weights: str) -> nn.Module:
    from torchvision import models
    from torchvision.models.feature_extraction import create_feature_extractor, get_graph_node_names

    default_weights = _torchvision_weights(network)
    if layer is None:
        raise DiffcapError(f"--model.stage is missing: give the name of a node of {network}, for example layer4.")
    if weights == "default":
        classifier = download(network, default_weights.url, lambda: models.get_model(network, weights=default_weights))
    else:
        classifier = models.get_model(network, weights=None)
    if network in _NETWORKS_THAT_RESCALE:
        classifier.transform_input = False
    try:
        trunk = create_feature_extractor(classifier.eval(), {str(layer): "map"})
    except ValueError:
        nodes = get_graph_node_names(classifier)[1]
        examples = ", ".join(nodes[:2] + nodes[-4:-2])
        raise DiffcapError(
            f"{network} has no node {layer!r}; choose another --model.stage (some of its nodes: {examples})."
        ) from None
    if weights not in ("default", "random"):
        state = read_state_dict(weights)
        # torchvision renames the parameters of some of its files while it loads them (densenet121, vit_b_16). To rename those in
        # `state`, torchvision is made to load `state` in place of its file. If this fails, the parameters keep their names.
        with suppress(Exception), patch.object(type(default_weights), "get_state_dict", lambda *_, **__: dict(state)):
            state = models.get_model(network, weights=default_weights).state_dict()
        load_weights(trunk, state, weights)
    return _SingleOutput(trunk)


class _SingleOutput(nn.Module):
    """Returns the feature map from the dict that a torchvision feature extractor returns."""

    def __init__(self, extractor: nn.Module) -> None:
        super().__init__()
        self.extractor = extractor  # do not rename: the attribute's name is part of the hash of the weights

    def forward(self, images: Tensor) -> Tensor:
        return self.extractor(images)["map"]


def _build_open_clip(network: str, layer: str | int | None, weights: str) -> nn.Module:
    import open_clip
    from open_clip.convert import convert_state_dict

    name, _, settings = find_clip_weights(network, from_file=weights not in ("default", "random"))
    if weights == "default":
        model = load_pretrained_clip(network)
    else:
        quick_gelu = bool(settings.get("quick_gelu"))
        model = open_clip.create_model(name, pretrained=None, load_weights=False, force_quick_gelu=quick_gelu)
    image_encoder = model.visual
    if weights not in ("default", "random"):
        state = convert_state_dict(model, read_state_dict(weights))
        visual_state = {key.removeprefix("visual."): value for key, value in state.items() if key.startswith("visual.")}
        load_weights(image_encoder, visual_state or state, weights)
    # The encoder's final LayerNorm is applied to all tokens, not only to the class token.
    return _IntermediateMap(image_encoder, layer, "open_clip", normalize_intermediates=True)


def _timm_settings(network: str) -> dict[str, Any]:
    """Return timm's settings (mean, std, input_size, url, ...) for the weights of a model NAME or NAME.TAG."""
    from timm import models

    if not models.is_model(network):
        raise DiffcapError(f"timm has no model {network!r}; `timm.list_models()` lists them.")
    try:
        settings = models.get_pretrained_cfg(network)
    except RuntimeError:  # unknown tag
        name, _, tag = network.partition(".")
        tags = ", ".join(model.partition(".")[2] for model in models.list_pretrained(f"{name}.*"))
        raise DiffcapError(f"timm has no weights {tag!r} of {name}; choose one of {tags or 'no tags'}.") from None
    return settings.to_dict() if settings else {}


def _build_timm(network: str, layer: str | int | None, weights: str, norm: bool, is_resized: bool) -> nn.Module:
    import timm

    def create(**options: Any) -> Any:
        """Build the model. With `is_resized`, one with position embeddings resamples them for each size; others take any size."""
        if is_resized:
            with suppress(TypeError):  # the model has no such option
                return timm.create_model(network, num_classes=0, dynamic_img_size=True, **options)
        return timm.create_model(network, num_classes=0, **options)

    settings = _timm_settings(network)
    if weights == "default":
        repository = settings.get("hf_hub_id")
        file = settings.get("hf_hub_filename") or "model.safetensors"
        url = f"https://huggingface.co/{repository}/resolve/main/{file}" if repository else settings.get("url")
        if not url:
            raise DiffcapError(f"timm has no weights for {network}; give a file as {WEIGHTS_VARIABLE}=PATH.")
        model = download(network, url, lambda: create(pretrained=True))
    else:
        model = create(pretrained=False)
    if weights not in ("default", "random"):
        state = read_state_dict(weights)
        # timm renames the parameters while it loads a file of a network's authors. If this fails, the parameters keep their names.
        with suppress(Exception):
            overlay = {"state_dict": dict(state)}
            converted = create(pretrained=True, pretrained_cfg_overlay=overlay).state_dict()
            # timm also resamples a `pos_embed` (position embedding) of another size. The file of DINOv2's authors, in which the parameters
            # have other names, needs this. A file with timm's names and another size is a mistake, which `load_weights` must refuse.
            expected = model.state_dict()
            if expected.keys() - state.keys() or all(state[key].numel() == expected[key].numel() for key in expected):
                state = converted
        load_weights(model, state, weights)
    return _IntermediateMap(model, layer, "timm", norm=norm)


class _IntermediateMap(nn.Module):
    """Returns the feature map of one layer, without class tokens, with a method that timm's and open_clip's networks have."""

    def __init__(self, network: nn.Module, layer: str | int | None, library: str, **options: bool) -> None:
        super().__init__()
        self.network = network
        self.layer = layer
        self.options = options
        if not hasattr(network, "forward_intermediates"):
            raise DiffcapError(f"{type(network).__name__} has no intermediate maps; choose another network.")
        if layer is not None and not str(layer).removeprefix("-").isdecimal():
            raise DiffcapError(f"--model.stage={layer} is not a block of {library}; give its number, or null.")

    def forward(self, images: Tensor) -> Tensor:
        indices = 1 if self.layer is None else [int(self.layer)]  # 1: only the last block
        try:
            outputs = self.network.forward_intermediates(  # type: ignore[operator]
                images, indices=indices, intermediates_only=True, output_fmt="NCHW", **self.options
            )
        except AssertionError as error:  # the network has fewer blocks, or is for another size
            size = ",".join(map(str, images.shape[2:]))
            option = f"stage={self.layer}" if "index" in str(error) else f"image_size=[{size}]"
            raise DiffcapError(f"--model.{option}: {error}; give another value.") from None
        maps = outputs["image_intermediates"] if isinstance(outputs, dict) else outputs
        return maps[-1]


def rebuild_backbone(meta: Mapping[str, Any], weights: str | None = None) -> Backbone:
    """Build the backbone that `meta`, a store's `meta.json`, describes. `weights` is a file that replaces the default weights."""
    library: Any = meta.get("library")
    name = meta.get("network") or library
    if library not in library_names():
        raise DiffcapError(
            f"the captioner's features were computed by {library!r:.40}, not by a backbone of diffcap, so it cannot caption "
            "images; caption a feature store with `diffcap eval`."
        )
    if "longest_side" in (meta.get("preprocessing") or {}):  # a vision-language model, which reads images of any size
        preprocess = ShrinkLongestSide(meta["preprocessing"]["longest_side"])
        return Backbone(nn.Identity(), preprocess, {"library": library})
    size = meta["preprocessing"].get("size") if library in ("pixels", "torchvision", "timm") else None
    std = meta["preprocessing"].get("std") if library == "torchvision" else None
    try:
        backbone = build_backbone(
            library,
            _open_clip_network(meta) if library == "open_clip" and (weights or "tag" in meta) else meta.get("network"),
            meta.get("stage"),
            weights if weights is not None and library != "pixels" else "default",
            meta.get("pool"),
            size,
            std,
            meta.get("norm", False),
        )
    except DiffcapError as error:  # the error names variables of `make extract`
        raise DiffcapError(str(error).replace(OFFLINE_HINT, "").replace(WEIGHTS_VARIABLE, _WEIGHTS_OPTION)) from None
    description = json.loads(json.dumps(backbone.describe()))
    for key in ("preprocessing", "pool", "quick_gelu", "weights_sha256"):
        if key == "weights_sha256" and meta.get(key) is None:
            continue  # the hash is unknown if the captioner was imported from its authors' checkpoint
        if description.get(key) != meta.get(key):
            fault = {"weights_sha256": "other weights", "quick_gelu": "another activation"}.get(key, f"another {key}")
            raise DiffcapError(
                f"the captioner was trained on features of {name} with {fault}; give the file of its backbone's weights as "
                f"{_WEIGHTS_OPTION} FILE, or use the version of diffcap that trained it."
            )
    return backbone


def _open_clip_network(meta: Mapping[str, Any]) -> str:
    """Return a store's open_clip network as NAME:TAG. If `meta` has no tag, find one with the same activation and preprocessing."""
    import open_clip

    name = meta["network"]
    tags = [meta["tag"]] if "tag" in meta else open_clip.list_pretrained_tags_by_model(name)
    for network in (f"{name}:{tag}" for tag in tags):
        preprocessing = json.loads(json.dumps(find_preprocessing("open_clip", network).describe()))
        if (describe_clip(network).get("quick_gelu"), preprocessing) == (meta.get("quick_gelu"), meta["preprocessing"]):
            return network
    return name


@torch.no_grad()
def compute_features(backbone: Backbone, images: Tensor, meta: Mapping[str, Any]) -> Tensor:
    """Compute features of preprocessed images (B, 3, H, W). They are equal to the features in a store whose `meta.json` is `meta`.

    Returns:
        (B, C, h, w) uint8 for pixels, else float32 that is rounded to float16.
    """
    features = backbone(images)
    if list(features.shape[1:]) != list(meta["shape"]):
        raise DiffcapError(
            f"the features of {meta.get('network') or meta['library']} have shape {tuple(features.shape[1:])}, the captioner "
            f"was trained on {tuple(meta['shape'])}; give the backbone's own weights as {_WEIGHTS_OPTION} FILE."
        )
    if meta.get("dtype") == "uint8":
        return features.round().clamp(0, 255).to(torch.uint8)
    float16_max = torch.finfo(torch.float16).max
    return features.clamp(-float16_max, float16_max).half().float()
