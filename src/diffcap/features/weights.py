"""Read, download, check and hash weights of backbones, the networks that compute features. Shipped backbones use `conv_block`."""

import copy
import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from diffcap.checkpoints.hub_access import offline_reason, use_only_hub_cache
from diffcap.utils.errors import DiffcapError
from diffcap.utils.unpickling import error_reason

# Parts of messages for `make extract WEIGHTS=FILE`. `diffcap caption` has other options, so `backbones.rebuild_backbone` replaces them.
WEIGHTS_VARIABLE = "WEIGHTS"
OFFLINE_HINT = ", or use OFFLINE=yes to try diffcap with the small networks that ship with it"

Result = TypeVar("Result")
Network = TypeVar("Network", bound=nn.Module)


def read_state_dict(path: str | Path, option: str | None = None) -> dict[str, Tensor]:
    """Read a state dict from a `.safetensors`, `.pth`, `.pt` or `.bin` file without executing code. Errors name the `option`."""
    path = Path(path)
    if not path.is_file():
        raise DiffcapError(f"{path}: no weights file there; check the path given as {option or WEIGHTS_VARIABLE}.")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            state: Any = load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # for files of another type, the unpickler raises errors of many types
        raise DiffcapError(
            f"{path}: cannot be read as a safetensors or PyTorch weights file ({error_reason(error)}); fetch it again or "
            "save it as a plain state dict."
        ) from None
    for key in ("state_dict", "model_state_dict", "model"):  # a file may contain the state dict under one of these keys
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
            break
    if not isinstance(state, dict) or not state or not all(isinstance(value, Tensor) for value in state.values()):
        raise DiffcapError(f"{path}: not a state dict of tensors; save it with `torch.save(model.state_dict(), ...)`.")
    # `torch.nn.DataParallel` adds the prefix "module.".
    return {name.removeprefix("module."): value for name, value in state.items()}


def load_weights(network: nn.Module, state: dict[str, Tensor], file: str) -> None:
    """Load all parameters and buffers of `network` from `state`, the content of `file`. Other entries of `state` are ignored."""
    old_state = network.state_dict()
    optional = "num_batches_tracked"  # missing in files from before 2018, and not used for inference
    missing = [name for name in old_state if name not in state and not name.endswith(optional)]
    faults = [f"{len(missing)} of {len(old_state)} keys are missing ({', '.join(missing[:4])})"] if missing else []
    faults += [
        f"{name} has shape {tuple(state[name].shape)}, this network needs {tuple(value.shape)}"
        for name, value in old_state.items()
        if name in state and state[name].shape != value.shape
    ]
    if faults:
        raise DiffcapError(f"{file}: not the weights of this network: {faults[0]}; give the file that fits.")
    network.load_state_dict({name: state.get(name, value) for name, value in old_state.items()})


def state_hash(network: nn.Module) -> str:
    """Return the SHA-256 of names, shapes and values of all parameters and buffers. The hash does not depend on the file format."""
    digest = hashlib.sha256()
    for name, value in sorted(network.state_dict().items()):
        if name.endswith("num_batches_tracked"):
            continue
        array = value.detach().cpu().float().contiguous().numpy()
        digest.update(f"{name} {array.shape}\n".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def conv_block(
    in_channels: int,
    out_channels: int,
    kernel_size: int,
    stride: int = 1,
    padding: int | tuple[int, int] = 0,
    norm: bool = False,
    dilation: int = 1,
) -> nn.Sequential:
    """Return a convolution, batch norm (if `norm`) and ReLU."""
    conv = nn.Conv2d(in_channels, out_channels, kernel_size, stride, padding, dilation)
    return nn.Sequential(conv, nn.BatchNorm2d(out_channels) if norm else nn.Identity(), nn.ReLU(inplace=True))


def fuse_batch_norms(network: Network) -> Network:
    """Return a copy for inference, with every batch norm of a `conv_block` merged into the convolution before it."""
    network = copy.deepcopy(network).eval()
    for module in network.modules():
        if isinstance(module, nn.Sequential) and len(module) == 3 and isinstance(module[1], nn.BatchNorm2d):
            conv = module[0]
            assert isinstance(conv, nn.Conv2d)
            module[0], module[1] = fuse_conv_bn_eval(conv, module[1]), nn.Identity()
    return network


def load_shipped_or_file(network: Network, weights: str, shipped_file: Path) -> Network:
    """Load weights into a network. `weights` is "default" (load `shipped_file`), the path of a file, or "random" (load nothing)."""
    if weights != "random":
        file = shipped_file if weights == "default" else Path(weights)
        load_weights(network, read_state_dict(file), str(file))
    return network


def find_clip_weights(network: str, from_file: bool = False) -> tuple[str, str, dict[str, Any]]:
    """Return the name of an open_clip model, the tag of its weights, and open_clip's settings of the tag (mean, quick_gelu, url, ...).

    `network` is NAME or NAME:TAG, as in `open_clip.list_pretrained(as_str=True)`. Without TAG, the tag is "openai" or else the model's
    first tag; a model without tags has the tag "" and no settings. For a user's file (`from_file`), TAG is required if the tags differ.
    """
    import open_clip
    from open_clip.pretrained import get_pretrained_cfg

    name, _, tag = network.partition(":")
    if name not in open_clip.list_models():
        raise DiffcapError(f"open_clip has no model {name!r}; `open_clip.list_models()` lists them.")
    tags = open_clip.list_pretrained_tags_by_model(name)
    if tag and tag not in tags:
        raise DiffcapError(f"open_clip has no weights {tag!r} of {name}; choose one of {', '.join(tags) or 'no tags'}.")
    all_settings = [get_pretrained_cfg(name, known_tag) for known_tag in tags]
    file_needs = {(bool(settings.get("quick_gelu")), settings["mean"], settings["std"]) for settings in all_settings}
    if from_file and not tag and len(file_needs) > 1:
        raise DiffcapError(
            f"{name} has weights that need different activations or preprocessing, which a file does not contain; name them as "
            f"--model.network={name}:TAG, where TAG is one of {', '.join(tags)}."
        )
    tag = tag or ("openai" if "openai" in tags else next(iter(tags), ""))
    return name, tag, get_pretrained_cfg(name, tag)


def describe_clip(network: str) -> dict[str, Any]:
    """Return entries of `meta.json`: the name, TAG if given, and "quick_gelu" if the weights need it and the model lacks it."""
    import open_clip

    name, tag, settings = find_clip_weights(network)
    needs_quick_gelu = settings.get("quick_gelu") and not open_clip.get_model_config(name).get("quick_gelu")
    entries = {"network": name, **({"tag": tag} if ":" in network else {})}
    return {**entries, "quick_gelu": True} if needs_quick_gelu else entries


def load_pretrained_clip(network: str) -> Any:
    """Return an open_clip model with pretrained weights and the activation that they need; `network` is NAME or NAME:TAG."""
    import open_clip

    name, tag, settings = find_clip_weights(network)
    if not tag:
        raise DiffcapError(f"open_clip has no weights for {network}; give a file as {WEIGHTS_VARIABLE}=PATH.")
    repository, _, file = settings.get("hf_hub", "").rpartition("/")
    hub_url = f"https://huggingface.co/{repository}/resolve/main/{file or 'open_clip_model.safetensors'}"
    quick_gelu = bool(settings.get("quick_gelu"))
    return download(
        f"{name} ({tag})",
        hub_url if repository else settings["url"],
        lambda: open_clip.create_model(name, pretrained=tag, force_quick_gelu=quick_gelu),
    )


def download(network: str, url: str, fetch: Callable[[], Result]) -> Result:
    """Return the result of `fetch`, a library's download function. If it fails, the error names the `network` and the file's `url`."""
    try:
        with use_only_hub_cache(reason := offline_reason()):  # offline, `fetch` finds only files in its cache
            if reason:
                logging.disable(logging.ERROR)  # open_clip would log the failure as well
            return fetch()
    except Exception as error:  # the libraries raise errors of many types
        reason = " ".join(str(error).split("\n")[0].split())[:200] or type(error).__name__
        is_refused = getattr(getattr(error, "response", None), "status_code", None) in (401, 403)
        remedy = "accept the licence on their page and log in with `hf auth login`, or " if is_refused else ""
        raise DiffcapError(
            f"the default weights of {network} are not cached and cannot be downloaded ({reason}); {remedy}fetch {url} "
            f"elsewhere and give it as {WEIGHTS_VARIABLE}=PATH{OFFLINE_HINT}."
        ) from None
    finally:
        logging.disable(logging.NOTSET)
