"""Weights of backbones: reading a file of any common form, saying what is missing in it, hashing what was loaded."""

import hashlib
import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from diffcap.errors import DiffcapError
from diffcap.unpickling import error_reason

# What people wrap a state dict in: the key of the dict that holds it, and the prefix that DataParallel leaves.
_WRAPPERS = ("state_dict", "model_state_dict", "model")
_PREFIX = "module."

T = TypeVar("T")


def read_state_dict(path: str | Path, option: str = "--model.weights") -> dict[str, Tensor]:
    """Read weights from a `.safetensors` file, or from a `.pth`, `.pt` or `.bin` file of tensors (no code is run).

    Raises:
        DiffcapError: no such file, or not a file of weights.
    """
    path = Path(path)
    if not path.is_file():
        raise DiffcapError(f"{path}: no weights file there; check the path given as {option}.")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            state: Any = load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # text makes the unpickler stumble over its letters in any way at all
        raise DiffcapError(
            f"{path}: cannot be read as a safetensors or PyTorch weights file ({error_reason(error, path)}); fetch it again or "
            "save it as a plain state dict."
        ) from None
    for wrapper in _WRAPPERS:
        if isinstance(state, dict) and isinstance(state.get(wrapper), dict):
            state = state[wrapper]
            break
    if not isinstance(state, dict) or not state or not all(isinstance(value, Tensor) for value in state.values()):
        raise DiffcapError(f"{path}: not a state dict of tensors; save it with `torch.save(model.state_dict(), ...)`.")
    return {name.removeprefix(_PREFIX): value for name, value in state.items()}


def load_weights(network: nn.Module, state: dict[str, Tensor], source: str) -> None:
    """Fill every parameter and buffer of `network`; what else `state` has (a classifier, a text tower) is left out.

    Raises:
        DiffcapError: names are missing or of another shape; the first are named.
    """
    wanted = network.state_dict()
    optional = "num_batches_tracked"  # files older than 2018 lack it, and inference does not read it
    missing = [name for name in wanted if name not in state and not name.endswith(optional)]
    if missing:
        raise DiffcapError(
            f"{source}: not the weights of this network, {len(missing)} of {len(wanted)} keys are missing "
            f"({', '.join(missing[:4])}{', ...' if len(missing) > 4 else ''}); give the file that fits the configuration."
        )
    for name, value in wanted.items():
        if name in state and state[name].shape != value.shape:
            raise DiffcapError(
                f"{source}: {name} has shape {tuple(state[name].shape)}, this network needs {tuple(value.shape)}; give "
                "the file that fits the configuration."
            )
    network.load_state_dict({name: state.get(name, value) for name, value in wanted.items()})


def state_hash(network: nn.Module) -> str:
    """SHA-256 over names, shapes and values of all parameters and buffers: the same from any file format."""
    digest = hashlib.sha256()
    for name, value in sorted(network.state_dict().items()):
        if name.endswith("num_batches_tracked"):
            continue
        array = value.detach().cpu().float().contiguous().numpy()
        digest.update(f"{name} {array.shape}\n".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


@contextmanager
def _quick_when_offline() -> Iterator[None]:
    """Without a network, let the Hugging Face client use its cache or fail at once (it would retry for minutes)."""
    import huggingface_hub.constants as hub

    was = hub.HF_HUB_OFFLINE
    try:
        if not was and not _resolves("huggingface.co"):
            hub.HF_HUB_OFFLINE = True
            logging.disable(logging.ERROR)  # open_clip would report the failure once more in its own words
        yield
    finally:
        logging.disable(logging.NOTSET)
        hub.HF_HUB_OFFLINE = was


def _resolves(host: str) -> bool:
    import urllib.request

    if urllib.request.getproxies():  # then the proxy resolves names
        return True
    try:
        socket.getaddrinfo(host, 443)
    except OSError:
        return False
    return True


def pretrained_clip(network: str, option: str = "--model.weights") -> Any:
    """An open_clip model with the weights of its tag "openai" if it has that, else of its first.

    Args:
        network: open_clip's name. option: that takes a file instead, for the error.

    Raises:
        DiffcapError: no weights are known, or they could not be downloaded.
    """
    import open_clip
    from open_clip import pretrained

    tags = open_clip.list_pretrained_tags_by_model(network)
    if not tags:
        raise DiffcapError(f"open_clip has no weights for {network}; give a file as {option}=PATH.")
    tag = "openai" if "openai" in tags else tags[0]
    cfg = pretrained.get_pretrained_cfg(network, tag)
    repository, _, file = cfg.get("hf_hub", "").rpartition("/")
    hub = f"https://huggingface.co/{repository}/resolve/main/{file or 'open_clip_model.safetensors'}"
    source = hub if repository else cfg["url"]
    return download(f"{network} ({tag})", source, lambda: open_clip.create_model(network, pretrained=tag), option)


def download(network: str, file: str, fetch: Callable[[], T], option: str = "--model.weights") -> T:
    """Run a library's own download; `network`, `file` (where it comes from) and `option` are for the error.

    Raises:
        DiffcapError: it failed; says which file to fetch by other means.
    """
    try:
        with _quick_when_offline():
            return fetch()
    except Exception as error:  # every library has its own errors here
        reason = " ".join(str(error).split("\n")[0].split())[:200] or type(error).__name__
        raise DiffcapError(
            f"the default weights of {network} are neither cached nor could they be downloaded ({reason}); fetch {file} "
            f"elsewhere and give it as {option}=PATH."
        ) from None
