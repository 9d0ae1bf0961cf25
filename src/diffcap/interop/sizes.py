"""Derive the hyperparameters of a model from the shapes of its official weights."""

import json
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from diffcap.features.preprocessing import SCORER_STD, ResizeNormalize, ResizeOnly
from diffcap.utils.errors import DiffcapError

State = Mapping[str, Tensor]


class Sizes(NamedTuple):
    """What the weights determine."""

    model: dict[str, Any]  # constructor arguments of diffcap's model
    max_length: int  # maximal number of tokens of a caption
    features: dict[str, Any]  # metadata of the feature store
    finetune_only: tuple[str, ...] = ()  # arguments that the pre-training model does not have


def _count(state: State, pattern: str) -> int:
    """Count the layers whose number the first group of the pattern matches."""
    found = {int(match[1]) for name in state if (match := re.match(pattern, name))}
    if found and max(found) >= len(found):
        raise ValueError(f"there are {len(found)} layers, but one has the number {max(found)}")
    return len(found)


def _resnet(
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


def _pixels(size: tuple[int, int]) -> dict[str, Any]:
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


def _shared_sizes(state: State, options: Mapping[str, Any], tables: State, decoder_layer: str) -> Sizes:
    """The hyperparameters that SCORER and DIRL share."""
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
        "decoder_layers": _count(state, decoder_layer),
    }
    return Sizes(
        model, max_length, _resnet("layer3", (feature_channels, grid[0], grid[1]), ResizeNormalize(std=SCORER_STD))
    )


def scorer_sizes(state: State, options: Mapping[str, Any], tables: State) -> Sizes:
    """Hyperparameters of SCORER; official checkpoints have no CBR."""
    sizes = _shared_sizes(state, options, tables, r"speaker_state\.core\.layer\.(\d+)\.")
    sizes.model["encoder_layers"] = _count(state, r"change_detector_state\.scorer\.(\d+)\.")
    sizes.model["cbr_weight"] = 0.001 if any(name.startswith("cbr.") for name in state) else 0.0
    return sizes


def dirl_sizes(state: State, options: Mapping[str, Any], tables: State) -> Sizes:
    """Hyperparameters of DIRL, for both decoder variants."""
    sizes = _shared_sizes(state, options, tables, r"speaker_state\.core\.layer\.(\d+)\.")
    projector = state.get("change_detector_state.mlp.0.weight")
    sizes.model.update(
        {
            "encoder_layers": _count(state, r"change_detector_state\.transformer\.(\d+)\."),
            "ffn": len(state["speaker_state.core.layer.0.linear1.weight"]),
            "decoder_variant": "ln_xavier" if "speaker_state.core.embed_fc.1.weight" in state else "plain",
            **({"projector_width": len(projector)} if projector is not None else {"decorrelation_weight": 0.0}),
        }
    )
    return sizes


def pcl_sizes(state: State, options: Mapping[str, Any], tables: State) -> Sizes:
    """Hyperparameters of IDC-PCL, for both stages."""
    front = state["img_project.0.weight"]
    grid = options["grid"] or (7, 7)
    max_length = options["max_length"] or 40
    layers = {ours: _count(state, rf"{theirs}\.layers\.(\d+)\.") for ours, theirs in _PCL_STACKS.items()}
    model = {
        "vocabulary_size": len(state["word_embedding.weight"]),
        "feature_channels": front.shape[1],
        "width": len(front),
        "heads": options["heads"],
        "ffn": len(state["encoder.layers.0.feed_forward.w_1.weight"]),
        **layers,
        "distractor_judging": "pooler.0.weight" in state,
    }
    return Sizes(model, max_length, _resnet("layer4", (front.shape[1], *grid)), ("distractor_judging",))


_PCL_STACKS = {"single_layers": "single_img_encoder", "pair_layers": "double_img_encoder", "cross_layers": "encoder"}


def clip4idc_sizes(state: State, options: Mapping[str, Any], tables: State) -> Sizes:
    """Hyperparameters of CLIP4IDC, for both stages; a ViT-B/32 is given by its name."""
    vision_width, _, patch, _ = state["clip.visual.conv1.weight"].shape
    heads = options["vision_heads"] or max(1, vision_width // 64)  # CLIP's rule
    if vision_width % heads:
        raise DiffcapError(
            f"--vision-heads is {heads}, which does not divide the width {vision_width} of the image tower; give its number of "
            "heads."
        )
    side = math.isqrt(len(state["clip.visual.positional_embedding"]) - 1)
    context, text_width = state["clip.positional_embedding"].shape
    vocabulary = len(state["clip.token_embedding.weight"])
    text_layers = _count(state, r"clip\.transformer\.resblocks\.(\d+)\.")
    network: Any = {
        "embed_dim": state["clip.visual.proj"].shape[1],
        "quick_gelu": True,
        "vision_cfg": {
            "image_size": patch * side,
            "patch_size": patch,
            "width": vision_width,
            "head_width": vision_width // heads,
            "layers": _count(state, r"clip\.visual\.transformer\.resblocks\.(\d+)\."),
        },
        "text_cfg": {
            "context_length": context,
            "vocab_size": vocabulary,
            "width": text_width,
            "heads": max(1, text_width // 64),
            "layers": max(1, text_layers),
        },
    }
    if network == _VIT_B_32:
        network = "ViT-B-32-quickgelu"
    max_length = options["max_length"] or min(33, context + 1)
    features = _pixels((patch * side, patch * side))
    model: dict[str, Any] = {
        "vocabulary_size": vocabulary,
        "network": network,
        "intra_layers": options["intra_layers"],
        "max_length": max_length,
    }
    inner = state.get("decoder.decoder.layer.0.intermediate.dense.weight")
    if inner is not None:
        model |= {
            "width": inner.shape[1],
            "heads": options["heads"],
            "ffn": len(inner),
            "encoder_layers": _count(state, r"decoder\.encoder\.layer\.(\d+)\."),
            "decoder_layers": _count(state, r"decoder\.decoder\.layer\.(\d+)\."),
            "padding": "released",
        }
    else:
        model["max_length"] = max_length = options["max_length"] or min(32, context)
    return Sizes(model, max_length, features)


_VIT_B_32 = {
    "embed_dim": 512,
    "quick_gelu": True,
    "vision_cfg": {"image_size": 224, "patch_size": 32, "width": 768, "head_width": 64, "layers": 12},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 512, "heads": 8, "layers": 12},
}


def rsiccformer_sizes(state: State, options: Mapping[str, Any], tables: State) -> Sizes:
    """Hyperparameters of RSICCformer, with or without the backbone."""
    front = state["encoder_feat.projection.weight"]
    grid = [len(state[f"encoder_feat.{side}_embedding.weight"]) for side in "hw"]
    max_length = options["max_length"] or len(state["decoder.position_encoding.embedding_1D.weight"])
    model: dict[str, Any] = {
        "vocabulary_size": len(state["decoder.vocab_embedding.weight"]),
        "feature_channels": front.shape[1],
        "grid": grid,
        "max_length": max_length,
        "width": len(front),
        "heads": options["heads"],
        "encoder_layers": _count(state, r"encoder_feat\.transformer\.(\d+)\."),
        "decoder_layers": _count(state, r"decoder\.transformer\.layers\.(\d+)\."),
    }
    network = _resnet_name(state, r"encoder_image\.net")
    if network is None:
        shape, pool = (front.shape[1], grid[0], grid[1]), (grid[0], grid[1])
        return Sizes(model, max_length, _resnet("layer3", shape, ResizeNormalize(_LEVIR_CC_SIZE), pool))
    model |= {"backbone": network, "pool": grid, "feature_channels": 3, "grid": list(_LEVIR_CC_SIZE)}
    return Sizes(model, max_length, _pixels(_LEVIR_CC_SIZE))


def chg2cap_sizes(state: State, options: Mapping[str, Any], tables: State) -> Sizes:
    """Hyperparameters of Chg2Cap, with or without the backbone; the option `dataset` says how pixels are normalised."""
    first = state["encoder_trans_dict.selftrans.0.0.att.to_k.weight"]
    attention_width, channels = first.shape
    table = next((value for name, value in tables.items() if name.startswith("decoder_dict.")), None)
    max_length = options["max_length"] or (41 if table is None else len(table))
    grid = options["grid"] or (8, 8)
    model: dict[str, Any] = {
        "vocabulary_size": len(state["decoder_dict.vocab_embedding.weight"]),
        "feature_channels": channels,
        "grid": list(grid),
        "max_length": max_length,
        "table": [len(state[f"encoder_trans_dict.{side}_embedding.weight"]) for side in "wh"],  # exchanged names
        "attention_width": attention_width,
        "ffn": len(state["encoder_trans_dict.selftrans.0.0.feedforward.net.0.weight"]),
        "width": len(state["decoder_dict.Conv1.weight"]),
        "heads": options["heads"],
        "encoder_layers": _count(state, r"encoder_trans_dict\.selftrans\.(\d+)\."),
        "decoder_layers": _count(state, r"decoder_dict\.transformer\.layers\.(\d+)\."),
    }
    network = _resnet_name(state, r"encoder_dict\.cnn")
    if network is None:
        shape = (channels, grid[0], grid[1])
        return Sizes(model, max_length, _resnet("layer4", shape, ResizeNormalize(_LEVIR_CC_SIZE)))
    is_dubai = options["dataset"] == "dubai_cc"
    size = _DUBAI_CC_SIZE if is_dubai else _LEVIR_CC_SIZE
    model |= {"backbone": network, "feature_channels": 3, "grid": list(size)}
    if is_dubai:
        model |= {"normalization": "dubai_cc", "resize": list(_LEVIR_CC_SIZE)}
    return Sizes(model, max_length, _pixels(size))


_LEVIR_CC_SIZE, _DUBAI_CC_SIZE = (256, 256), (50, 50)  # height and width of the images
# By the blocks of the first three layers, and whether a block has three convolutions.
_RESNETS: dict[tuple[tuple[int, ...], bool], str] = {
    ((2, 2, 2), False): "resnet18",
    ((3, 4, 6), False): "resnet34",
    ((3, 4, 6), True): "resnet50",
    ((3, 4, 23), True): "resnet101",
    ((3, 8, 36), True): "resnet152",
}


def _resnet_name(state: State, prefix: str) -> str | None:
    """torchvision's name of the ResNet with numbered layers; None if there is no such network."""
    if not any(re.match(prefix, name) for name in state):
        return None
    blocks = tuple(_count(state, rf"{prefix}\.{number}\.(\d+)\.") for number in (4, 5, 6))
    has_three = any(re.fullmatch(rf"{prefix}\.4\.0\.conv3\.weight", name) for name in state)
    if (blocks, has_three) not in _RESNETS:
        raise ValueError(f"its backbone has {blocks} blocks, which is no known ResNet")
    return _RESNETS[blocks, has_three]
