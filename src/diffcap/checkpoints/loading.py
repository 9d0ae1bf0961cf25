"""Load a captioner from its checkpoint alone: the model, its vocabulary, and the features that it reads."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jsonargparse import ArgumentParser
from torch import Tensor
from torch.nn import Module
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

import diffcap
from diffcap.checkpoints.hub import pull
from diffcap.checkpoints.hub_access import is_name
from diffcap.checkpoints.reading import CAPTIONING_STAGES, read_checkpoint, remedy, weights_of
from diffcap.checkpoints.zero_shot import names_base_model, zero_shot
from diffcap.methods import import_object, methods
from diffcap.models.captioner import Captioner
from diffcap.text.vocabularies import AnyVocabulary, vocabulary_of
from diffcap.utils.errors import DiffcapError, wrap_errors

MAX_SIZE = 4096  # limit of any size in the hyperparameters, unless a weight has a larger side


class Checkpoint(NamedTuple):
    """The content of a captioner's checkpoint.

    Attributes:
        captioner: in eval mode, on the CPU.
        vocabulary: its words.
        max_length: maximal number of tokens of a caption, special ones included.
        features: metadata of the feature store that it was trained on (backbone, weights, preprocessing, name).
        metadata: the other entries of the checkpoint (method, dataset, seed, version, ...), and "step".
    """

    captioner: Captioner
    vocabulary: AnyVocabulary
    max_length: int
    features: dict[str, Any]
    metadata: dict[str, Any]


def load(
    path: str | Path, base: str | Path | None = None, prompt: str | None = None, **zero_shot_options: Any
) -> Checkpoint:
    """Build the captioner of a fine-tuning checkpoint, or that of a vision-language model.

    Args:
        path: a checkpoint's file, an exported folder, `user/name` of either on the Hugging Face Hub, or a folder or `user/name` of
            a vision-language model, see `zero_shot`.
        base: folder or name of the base model of a checkpoint of METHOD=vlm, if it is not where the checkpoint says.
        prompt: question to a vision-language model; only without training.
        zero_shot_options: other options of `zero_shot`; they have no effect on a trained captioner.

    Raises:
        DiffcapError: as `read_checkpoint`; the checkpoint belongs to a pre-training stage; its method is unknown; or its
            hyperparameters, weights, vocabulary and features do not fit together.
    """
    if names_base_model(path):
        if base is not None:
            raise DiffcapError(f"{path}: is a base model itself; remove --base.")
        return zero_shot(path, prompt, **zero_shot_options)
    if prompt is not None:
        raise DiffcapError(
            f"{path}: was trained with its own prompt; --prompt is for vision-language models without training."
        )
    path = downloaded(path)
    state = read_checkpoint(path)
    metadata = dict(state["diffcap"])
    version = f"{metadata['version']:.40}"
    if metadata["stage"] not in CAPTIONING_STAGES:
        raise DiffcapError(
            f"{path}: a checkpoint of the {metadata['stage']:.40} stage cannot caption; fine-tune from it first."
        )
    if metadata["method"] not in methods():
        raise DiffcapError(
            f"{path}: its method {metadata['method']!r:.80} is unknown; known methods: {', '.join(methods())}. Install the "
            f"package that adds the method, or use diffcap {version}, which wrote the checkpoint."
        )
    is_other_version = metadata["version"] != diffcap.__version__
    with wrap_errors(
        path,
        f"diffcap {diffcap.__version__} cannot build its captioner",
        f"use diffcap {version}, which wrote it, or train it again" if is_other_version else remedy(Path(path)),
    ):
        spec = captioner_spec(state)
        arguments = {**spec.arguments, **_other_base(path, spec, base)}
        captioner: Any = spec.captioner_class(**arguments)
        captioner.load_state_dict(weights_of(state))
    for key in ("hyperparameters", "words", "vocabulary_layout", "max_length", "features"):
        metadata.pop(key, None)
    metadata["step"] = state["global_step"]
    return Checkpoint(
        captioner.eval(), spec.vocabulary or captioner.vocabulary, spec.max_length, spec.features, metadata
    )


def downloaded(source: str | Path) -> str | Path:
    """The folder of a captioner on the Hub, which is downloaded; other sources are returned as they are."""
    if isinstance(source, str) and not Path(source).exists() and is_name(source) and not source.endswith(".ckpt"):
        return pull(source)
    return source


def _other_base(path: str | Path, spec: "CaptionerSpec", base: str | Path | None) -> dict[str, Any]:
    """The arguments of a captioner on a base model that `base` replaces."""
    if not spec.captioner_class.on_base_model:
        if base is not None:
            raise DiffcapError(f"{path}: its captioner has no base model; remove --base.")
        return {}
    if base is not None:
        return {"base": str(base), "revision": None if Path(base).is_dir() else spec.arguments["revision"]}
    trained_on = spec.arguments["base"]
    if not Path(trained_on).is_dir() and not is_name(trained_on):
        raise MissingBaseModel(
            f"{path}: its base model {trained_on} is not on this machine; give its folder as --base FOLDER to diffcap caption, eval, "
            "export or serve."
        )
    return {}


class MissingBaseModel(DiffcapError):
    """The base model of a checkpoint is not where it was in training."""


class Retriever(NamedTuple):
    """The content of a checkpoint of CLIP4IDC's adaptation.

    Attributes:
        model: in eval mode, on the CPU. vocabulary, max_length, features, metadata: as in `Checkpoint`.
    """

    model: Module
    vocabulary: AnyVocabulary
    max_length: int
    features: dict[str, Any]
    metadata: dict[str, Any]


def load_retriever(path: str | Path) -> Retriever:
    """Build the model of a pre-training that retrieves pairs by captions."""
    state = read_checkpoint(path)
    metadata = dict(state["diffcap"])
    spec = methods().get(str(metadata.get("method")))
    if metadata["stage"] != "pretrain" or spec is None or spec.pretraining is None or not spec.pretraining.retrieval:
        raise DiffcapError(
            f"{path}: not a checkpoint of a pre-training that learns retrieval; give best.ckpt of CLIP4IDC's pre-training."
        )
    with wrap_errors(path, f"diffcap {diffcap.__version__} cannot build its model", remedy(Path(path))):
        vocabulary = vocabulary_of(metadata["words"], metadata["vocabulary_layout"])
        model = import_object(spec.pretraining.captioner)(**metadata["hyperparameters"])
        model.load_state_dict(weights_of(state))
    metadata["step"] = state["global_step"]
    return Retriever(model.eval(), vocabulary, metadata["max_length"], metadata["features"], metadata)


class CaptionerSpec(NamedTuple):
    """The class and constructor arguments of a captioner, and the other attributes of its `Checkpoint`.

    The vocabulary is None if it comes with the captioner's base model.
    """

    captioner_class: type[Captioner]
    arguments: dict[str, Any]
    vocabulary: AnyVocabulary | None
    max_length: int
    features: dict[str, Any]


def captioner_spec(state: dict[str, Any]) -> CaptionerSpec:
    """Check that a captioner can be built from a checkpoint, without allocating its weights.

    Args:
        state: a checkpoint of a captioning stage, see `read_checkpoint`.
    """
    metadata = state["diffcap"]
    captioner_class: type[Captioner] = import_object(methods()[metadata["method"]].captioner)
    max_length, features = metadata["max_length"], metadata["features"]
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(captioner_class)
    arguments = parser.parse_object(metadata["hyperparameters"]).as_dict()
    if captioner_class.on_base_model:  # its sizes are those of the base model, which is not read here
        _check_features(features, max_length, MAX_SIZE)
        captioner_class.check_state(arguments, weights_of(state))
        return CaptionerSpec(captioner_class, arguments, None, max_length, features)
    vocabulary = vocabulary_of(metadata["words"], metadata.get("vocabulary_layout", "pcl"))
    if len(vocabulary) < arguments["vocabulary_size"]:
        raise ValueError(
            f"it has {len(vocabulary)} words, special tokens included, but vocabulary_size is {arguments['vocabulary_size']}"
        )
    captioner = build_on_meta(captioner_class, arguments, weights_of(state))
    if vocabulary.family != captioner.vocabulary_layout:
        raise ValueError(f"its vocabulary_layout is {vocabulary.layout}, not {captioner.vocabulary_layout}")
    _check_shapes(captioner, max_length, features)
    return CaptionerSpec(captioner_class, arguments, vocabulary, max_length, features)


class _NoInitialValues(TorchFunctionMode):
    """Skips in-place operations: they change no shape, and random ones on the meta device import 900 modules."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.__name__
        if name.endswith("_") and not name.endswith("__") and name != "requires_grad_":
            return [*args, *kwargs.values()][0]
        if (
            func is torch.arange
        ):  # arithmetic with constants on the meta device imports torch._dynamo, which takes seconds
            kwargs = {**kwargs, "device": "cpu"}
        return func(*args, **kwargs)


def build_on_meta(model_class: Callable[..., Module], arguments: dict[str, Any], weights: dict[str, Tensor]) -> Any:
    """Build a model on the meta device, which allocates no memory, and compare the names and shapes of its weights.

    Returns:
        The model, without values.
    """
    limit = max([MAX_SIZE, *(side for value in weights.values() for side in value.shape)])
    invalid = [value for value in tree_leaves(arguments) if isinstance(value, int) and not 0 <= value <= limit]
    if invalid:
        raise ValueError(f"one of its sizes is {invalid[0]}")
    with torch.device("meta"), _NoInitialValues():
        model = model_class(**arguments)
    expected = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    found = {name: tuple(value.shape) for name, value in weights.items()}
    wrong = [name for name in {**expected, **found} if expected.get(name) != found.get(name)]
    if wrong:
        raise ValueError(
            f"{len(wrong)} weights do not fit its hyperparameters: {wrong[0]} should have shape {expected.get(wrong[0])}, "
            f"found {found.get(wrong[0])}"
        )
    return model


def _check_shapes(captioner: Captioner, max_length: int, features: dict[str, Any]) -> None:
    """Check that the captioner reads features of this shape, and has positions for captions of this length."""
    hyperparameters, shape = captioner.hyperparameters, features["shape"]
    limit = hyperparameters.get("max_length", hyperparameters.get("positions", max_length))
    _check_features(features, max_length, limit)
    images: Any = getattr(captioner, "images", None)
    if images is not None:  # the image tower of a captioner that reads pixels
        expected = [3, *images.image_size]
    else:
        expected = [hyperparameters.get("feature_channels", shape[0]), *hyperparameters.get("grid", shape[1:])]
        if shape[1] * shape[2] > MAX_SIZE:
            raise ValueError(f"its features have {shape[1]} x {shape[2]} positions, more than {MAX_SIZE}")
    if shape != expected:
        raise ValueError(f"its features have shape {shape}, but the captioner reads {expected}")


def _check_features(features: dict[str, Any], max_length: int, limit: int) -> None:
    """Check the sizes that a checkpoint says its features have, and that captions are not longer than `limit` tokens."""
    shape = features["shape"]
    if not _are_sizes(shape, 3):
        raise ValueError(f"the shape of its features is {shape!r:.80}")
    pixels = features.get("library") == "pixels"
    for name, size in (
        ("pool", features.get("pool")),
        ("preprocessing.size", features["preprocessing"]["size"] if pixels else None),
    ):
        if size is not None and size != shape[1:]:
            raise ValueError(f"its features have shape {shape} and the {name} {size!r:.80}")
    if not 2 <= max_length <= limit:
        raise ValueError(f"its max_length is {max_length}; it must be from 2 to {limit}")


def _are_sizes(value: Any, count: int) -> bool:
    numbers = value if isinstance(value, list | tuple) else ()
    return len(numbers) == count and all(isinstance(number, int) and number > 0 for number in numbers)
