"""Frozen networks that turn one image into a map of features, whatever library they come from.

| library | `network` | `stage` | default weights |
|---|---|---|---|
| `torchvision` | a classifier's name | a node's name: `layer3`, `features.28` | `IMAGENET1K_V1` |
| `open_clip` | a model's name | a block's number, or null for the last | the tag `openai` if there is one, else the first |
| `timm` | a model's name | a block's number, or null for the last | those of the tag in the name |
| `blocks` | null | null | shipped with the package |
| `pixels` | null | null | none: the picture itself, resized to `image_size`, uint8 |
| `clip4idc` | null | null | none: `weights` is a checkpoint of ours; the tokens of its layers for one image, normalised |

`resnet101` gives 1024 x 14 x 14 at `layer3` and 2048 x 7 x 7 at `layer4`.
"""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from diffcap.checkpoints.reading import read_checkpoint, weights_of
from diffcap.errors import DiffcapError, wrap_errors
from diffcap.features.preprocessing import Pixels, ResizeNormalize
from diffcap.features.weights import download, load_weights, pretrained_clip, read_state_dict, state_hash

Library = Literal["torchvision", "open_clip", "timm", "blocks", "pixels", "clip4idc"]


class Backbone(nn.Module):
    """A frozen network, the preprocessing that it expects, and what identifies both.

    Args:
        trunk: (B, 3, H, W) normalised images to a (B, C, h, w) map.
        preprocess: RGB picture to (3, H, W).
        description: JSON values that name the network; the hash of the weights, the preprocessing and the pooling are added.
        pool: (h, w) of an adaptive average pooling of the map, None for the map as it is.
    """

    def __init__(
        self,
        trunk: nn.Module,
        preprocess: ResizeNormalize | Pixels,
        description: dict[str, Any],
        pool: tuple[int, int] | None = None,
    ) -> None:
        super().__init__()
        self.trunk = trunk.eval().requires_grad_(False)
        self._preprocess = preprocess
        self._description = description
        self.pool = pool

    def forward(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) preprocessed images to (B, C, h, w) features."""
        features = self.trunk(images)
        return F.adaptive_avg_pool2d(features, self.pool) if self.pool else features

    def preprocess(self, image: Image.Image) -> Tensor:
        """RGB picture to (3, H, W) float32."""
        return self._preprocess(image)

    def describe(self) -> dict[str, Any]:
        """JSON values that tell two backbones apart if, and only if, their features differ."""
        return {
            **self._description,
            "weights_sha256": state_hash(self.trunk),
            "preprocessing": self._preprocess.describe(),
            "pool": self.pool,
        }

    @torch.no_grad()
    def shape(self) -> tuple[int, int, int]:
        """(C, h, w) of one image's features, found by running a blank one.

        Raises:
            DiffcapError: the chosen stage gives no map.
        """
        height, width = self._preprocess.size
        features = self.trunk(torch.zeros(1, 3, height, width))
        if not isinstance(features, Tensor) or features.ndim != 4:
            found = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
            raise DiffcapError(
                f"--model.stage={self._description.get('stage')} of {self._description.get('network')} gives {found}, not "
                "a map (1, C, h, w); choose an earlier stage."
            )
        channels, rows, columns = features.shape[1:]
        return (channels, *(self.pool or (rows, columns)))


def build_backbone(
    library: Library,
    network: str | None = None,
    stage: str | int | None = None,
    weights: str = "default",
    pool: tuple[int, int] | None = None,
    image_size: tuple[int, int] | None = None,
) -> Backbone:
    """Build a backbone.

    Args:
        library: where the network comes from.
        network: its name there; not used by `blocks`.
        stage: where in the network the map is taken (see the table above); null for the last map.
        weights: "default" (the library's own download), "random" (seed 0, for tests), or the path of a weights file.
        pool: rows and columns to average the map to.
        image_size: height and width of `pixels` (null: 224 each); the other libraries' networks have their own.

    Raises:
        DiffcapError: unknown network or stage, or the weights cannot be had.
    """
    if image_size is not None and library != "pixels":
        raise DiffcapError(f"--model.image_size is for pixels; {library} has a size of its own: leave the option out.")
    if library == "pixels":
        if weights != "default" or network is not None or stage is not None or pool is not None:
            raise DiffcapError(
                "pixels have no network, stage, pool or weights: leave those options out; CLIP's weights for CLIP4IDC are "
                "given to its training, as --model.clip_weights=FILE."
            )
        size = Pixels() if image_size is None else Pixels((image_size[0], image_size[1]))
        return Backbone(nn.Identity(), size, {"library": library, "dtype": "uint8"})
    builders: dict[Library, Callable[[str, str | int | None, str], tuple[nn.Module, ResizeNormalize | Pixels]]] = {
        "torchvision": _torchvision,
        "open_clip": _open_clip,
        "timm": _timm,
        "blocks": _blocks,
        "clip4idc": _clip4idc,
    }
    if library not in ("blocks", "clip4idc") and not network:
        raise DiffcapError(f"--model.network is missing: name one of the networks of {library}.")
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the libraries, about weights that are replaced below
        torch.manual_seed(0)  # the same "random" weights on every rank and in every run
        trunk, preprocess = builders[library](network or "", stage, weights)
    description = {"library": library, "network": network, "stage": stage}
    return Backbone(trunk, preprocess, description, (pool[0], pool[1]) if pool else None)


def _torchvision(network: str, stage: str | int | None, weights: str) -> tuple[nn.Module, ResizeNormalize]:
    from torchvision import models
    from torchvision.models.feature_extraction import create_feature_extractor, get_graph_node_names

    if network not in models.list_models(module=models):
        raise DiffcapError(f"torchvision has no classifier {network!r}; `torchvision.models.list_models()` lists them.")
    if stage is None:
        raise DiffcapError(f"--model.stage is missing: name a node of {network}, for example layer4.")
    full = models.get_model(network, weights=None).eval()
    if weights == "default":
        # V1 by name: what `DEFAULT` means has changed to V2 since the papers (methods of SCORER and DIRL).
        choice = models.get_model_weights(network)["IMAGENET1K_V1"]
        full.load_state_dict(download(network, choice.url, lambda: choice.get_state_dict(progress=True)))
    try:
        trunk = create_feature_extractor(full, {str(stage): "map"})
    except ValueError:
        nodes = get_graph_node_names(full)[1]
        near = ", ".join(nodes[:2] + nodes[-4:-2])
        raise DiffcapError(f"{network} has no node {stage!r} for --model.stage; some of its nodes: {near}.") from None
    if weights not in ("default", "random"):
        load_weights(trunk, read_state_dict(weights), weights)
    return _TakeMap(trunk), ResizeNormalize()


class _TakeMap(nn.Module):
    """A torchvision feature extractor that returns its one map instead of a dict of them."""

    def __init__(self, extractor: nn.Module) -> None:
        super().__init__()
        self.extractor = extractor

    def forward(self, images: Tensor) -> Tensor:
        return self.extractor(images)["map"]


def _open_clip(network: str, stage: str | int | None, weights: str) -> tuple[nn.Module, ResizeNormalize]:
    import open_clip

    if network not in open_clip.list_models():
        raise DiffcapError(f"open_clip has no model {network!r}; `open_clip.list_models()` lists them.")
    if weights == "default":
        model = pretrained_clip(network)
    else:
        model = open_clip.create_model(network, pretrained=None, load_weights=False)
    visual = model.visual
    if weights not in ("default", "random"):
        state = read_state_dict(weights)
        tower = {name.removeprefix("visual."): value for name, value in state.items() if name.startswith("visual.")}
        load_weights(visual, tower or state, weights)
    size = visual.image_size if isinstance(visual.image_size, tuple) else (visual.image_size, visual.image_size)
    preprocess = ResizeNormalize((size[0], size[1]), tuple(visual.image_mean), tuple(visual.image_std), antialias=True)
    # After the tower's last norm: what the class token of the same layer is read from.
    return _Intermediate(visual, _number(stage, "open_clip"), normalize_intermediates=True), preprocess


def _timm(network: str, stage: str | int | None, weights: str) -> tuple[nn.Module, ResizeNormalize]:
    import timm
    from timm.data import resolve_model_data_config

    if not timm.is_model(network):
        raise DiffcapError(f"timm has no model {network!r}; `timm.list_models()` lists them.")
    if weights == "default":
        cfg: Any = timm.create_model(network, pretrained=False).pretrained_cfg
        repository = cfg.get("hf_hub_id")
        hub = f"https://huggingface.co/{repository}/resolve/main/model.safetensors" if repository else cfg.get("url")
        model = download(network, str(hub), lambda: timm.create_model(network, pretrained=True, num_classes=0))
    else:
        model = timm.create_model(network, pretrained=False, num_classes=0)
    if weights not in ("default", "random"):
        load_weights(model, read_state_dict(weights), weights)
    data = resolve_model_data_config(model)
    _, height, width = data["input_size"]
    preprocess = ResizeNormalize((height, width), tuple(data["mean"]), tuple(data["std"]), antialias=True)
    return _Intermediate(model, _number(stage, "timm")), preprocess


class _Intermediate(nn.Module):
    """The map of one stage or block, by the interface that timm and open_clip share (class tokens are dropped)."""

    def __init__(self, network: nn.Module, stage: int | None, **options: bool) -> None:
        super().__init__()
        self.network = network
        self.stage = stage
        self.options = options
        if not hasattr(network, "forward_intermediates"):
            raise DiffcapError(f"{type(network).__name__} cannot give its inner maps; choose another network.")

    def forward(self, images: Tensor) -> Tensor:
        indices = 1 if self.stage is None else [self.stage]
        try:
            found = self.network.forward_intermediates(  # type: ignore[operator]
                images, indices=indices, intermediates_only=True, output_fmt="NCHW", **self.options
            )
        except AssertionError as error:  # the network has fewer stages
            raise DiffcapError(f"--model.stage={self.stage}: {error}; give another number.") from None
        maps = found["image_intermediates"] if isinstance(found, dict) else found
        return maps[-1]


def _number(stage: str | int | None, library: str) -> int | None:
    try:
        return None if stage is None else int(stage)
    except ValueError:
        raise DiffcapError(f"--model.stage of {library} is the number of a block or null, got {stage!r}.") from None


def _blocks(network: str, stage: str | int | None, weights: str) -> tuple[nn.Module, ResizeNormalize]:
    from diffcap.features.blocks_backbone import SHIPPED, BlocksNetwork, blocks_preprocessing

    trunk = BlocksNetwork()
    if weights != "random":
        path = SHIPPED if weights == "default" else Path(weights)
        load_weights(trunk, read_state_dict(path), str(path))
    return trunk, blocks_preprocessing()


def _clip4idc(network: str, stage: str | int | None, weights: str) -> tuple[nn.Module, Pixels]:
    if weights in ("default", "random"):
        raise DiffcapError(
            "--model.weights is missing: give the checkpoint of an adaptation, for example "
            "runs/blocks/clip4idc/pretrain/best.ckpt."
        )
    from diffcap.models.clip import PairTower, build_clip  # brings open_clip: not for a stage's --help

    state = read_checkpoint(weights)
    facts = state["diffcap"]
    if facts.get("method") != "clip4idc" or "hyperparameters" not in facts:
        raise DiffcapError(
            f"{weights}: not a checkpoint of CLIP4IDC; give that of its pre-training or captioning stage."
        )
    sizes = facts["hyperparameters"]
    if sizes.get("images", "together") != "together":
        raise DiffcapError(f"{weights}: its images stay apart (FT1, FT2); give the checkpoint of an adaptation.")
    with wrap_errors(weights, "its image tower cannot be built", f"use diffcap {facts['version']:.40}, which wrote it"):
        tower = PairTower(build_clip(sizes["network"], sizes["image_size"]), sizes["intra_layers"])
        tower.load_state_dict(weights_of(state, "captioner.images."))
    return _Alone(tower), Pixels(tower.image_size)


class _Alone(nn.Module):
    """The tokens of a `PairTower`'s layers for one image, through the norm before the layers for both, as a map.

    Without marks and joint positions, which say which of two images it is, and without the class token.
    """

    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        self.tower: Any = tower

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.tower.ln_mid(self.tower.encode_single(self.tower.normalize(images)))[:, 1:]
        return tokens.transpose(1, 2).unflatten(2, self.tower.grid)
