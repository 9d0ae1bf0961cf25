"""What a captioner's checkpoint alone holds: the model, its words, the features that it reads."""

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
from diffcap.checkpoints.reading import CAPTIONING_STAGES, read_checkpoint, remedy, weights_of
from diffcap.methods import import_object, methods
from diffcap.models.captioner import Captioner
from diffcap.text.vocabularies import AnyVocabulary, vocabulary_of
from diffcap.utils.errors import DiffcapError, wrap_errors

LARGEST = 4096  # size that any captioner may have, whatever its weights


class Checkpoint(NamedTuple):
    """What a fine-tuning checkpoint holds.

    Attributes:
        captioner: in eval mode, on the CPU. vocabulary: its words. max_length: positions of a caption.
        features: meta of the feature store it was trained on (backbone, weights, preprocessing, name).
        metadata: method, dataset, step, provenance.
    """

    captioner: Captioner
    vocabulary: AnyVocabulary
    max_length: int
    features: dict[str, Any]
    metadata: dict[str, Any]


def load(path: str | Path) -> Checkpoint:
    """Build the captioner of a fine-tuning checkpoint.

    Raises:
        DiffcapError: as `read_checkpoint`, or it is of a pre-training stage.
    """
    state = read_checkpoint(path)
    facts = dict(state["diffcap"])
    if facts["stage"] not in CAPTIONING_STAGES:
        raise DiffcapError(
            f"{path}: a checkpoint of the {facts['stage']:.40} stage cannot caption; fine-tune from it first."
        )
    if facts["method"] not in methods():
        raise DiffcapError(
            f"{path}: its method is {facts['method']!r:.80}, this diffcap knows {', '.join(methods())}; install the "
            f"package that adds the method, or use diffcap {facts['version']:.40}, which wrote the checkpoint."
        )
    other = facts["version"] != diffcap.__version__
    with wrap_errors(
        path,
        f"diffcap {diffcap.__version__} cannot build its captioner",
        f"use diffcap {facts['version']:.40}, which wrote it, or train it again" if other else remedy(Path(path)),
    ):
        plan = plan_of(state)
        captioner = plan.kind(**plan.settings)
        captioner.load_state_dict(weights_of(state))
    for key in ("hyperparameters", "words", "vocabulary_layout", "max_length", "features"):
        facts.pop(key, None)
    facts["step"] = state["global_step"]
    return Checkpoint(captioner.eval(), plan.vocabulary, plan.max_length, plan.features, facts)


class Plan(NamedTuple):
    """What a captioner is built from: its class with the constructor's arguments, and the rest of a `Checkpoint`."""

    kind: type[Captioner]
    settings: dict[str, Any]
    vocabulary: AnyVocabulary
    max_length: int
    features: dict[str, Any]


def plan_of(state: dict[str, Any]) -> Plan:
    """Check that a captioner can be built from a checkpoint, without memory for its weights.

    Args:
        state: as `read_checkpoint` gives it, of a captioning stage.

    Raises:
        Exception: of any type; its settings, weights, words and features do not fit one another.
    """
    metadata = state["diffcap"]
    kind: type[Captioner] = import_object(methods()[metadata["method"]].captioner)
    max_length, features = metadata["max_length"], metadata["features"]
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(kind)
    settings = parser.parse_object(metadata["hyperparameters"]).as_dict()
    vocabulary = vocabulary_of(metadata["words"], metadata.get("vocabulary_layout", "pcl"))
    if len(vocabulary) < settings["vocabulary_size"]:
        raise ValueError(
            f"it has {len(vocabulary)} words, special ones included, for a vocabulary_size of {settings['vocabulary_size']}"
        )
    captioner = without_memory(kind, settings, weights_of(state))
    if vocabulary.family != captioner.vocabulary_layout:
        raise ValueError(f"its vocabulary_layout is {vocabulary.layout}, not {captioner.vocabulary_layout}")
    _check_reads(captioner, max_length, features)
    return Plan(kind, settings, vocabulary, max_length, features)


class _NoInitialValues(TorchFunctionMode):
    """Leaves out operations in place: they change no shape, and on the meta device random ones import 900 modules."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.__name__
        if name.endswith("_") and not name.endswith("__") and name != "requires_grad_":
            return [*args, *kwargs.values()][0]
        if (
            func is torch.arange
        ):  # of constants; arithmetic on the meta device imports torch._dynamo, which takes seconds
            kwargs = {**kwargs, "device": "cpu"}
        return func(*args, **kwargs)


def without_memory(kind: Callable[..., Module], settings: dict[str, Any], weights: dict[str, Tensor]) -> Any:
    """Build a model on the meta device, which asks for no memory, and check that weights fit it.

    Returns:
        The model, without values.

    Raises:
        Exception: of any type; the settings make no model, or one with weights of other names or shapes.
    """
    largest = max([LARGEST, *(side for value in weights.values() for side in value.shape)])
    beyond = [value for value in tree_leaves(settings) if isinstance(value, int) and not 0 <= value <= largest]
    if beyond:
        raise ValueError(f"one of its sizes is {beyond[0]}")
    with torch.device("meta"), _NoInitialValues():
        model = kind(**settings)
    expected = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    found = {name: tuple(value.shape) for name, value in weights.items()}
    wrong = [name for name in {**expected, **found} if expected.get(name) != found.get(name)]
    if wrong:
        raise ValueError(
            f"its settings need {len(wrong)} other weights, as {wrong[0]} of shape {expected.get(wrong[0])}, not "
            f"{found.get(wrong[0])}"
        )
    return model


def _check_reads(captioner: Captioner, max_length: int, features: dict[str, Any]) -> None:
    """The features must be such as the captioner reads, and its captions no longer than it has positions for."""
    settings, shape = captioner.hyperparameters, features["shape"]
    if not _are_sizes(shape, 3):
        raise ValueError(f"the shape of its features is {shape!r:.80}")
    pixels = features.get("library") == "pixels"
    for name, size in (
        ("pool", features.get("pool")),
        ("preprocessing.size", features["preprocessing"]["size"] if pixels else None),
    ):
        if size is not None and size != shape[1:]:
            raise ValueError(f"its features have shape {shape} and the {name} {size!r:.80}")
    images: Any = getattr(captioner, "images", None)
    if images is not None:  # the tower of a captioner that reads pixels
        wanted = [3, *images.image_size]
    else:
        wanted = [settings.get("feature_channels", shape[0]), *settings.get("grid", shape[1:])]
        if shape[1] * shape[2] > LARGEST:
            raise ValueError(f"its features have {shape[1]} x {shape[2]} places, of at most {LARGEST}")
    if shape != wanted:
        raise ValueError(f"it reads features of shape {wanted}, and says {shape}")
    most = settings.get("max_length", settings.get("positions", max_length))
    if not 2 <= max_length <= most:
        raise ValueError(f"its captions have {max_length} positions, of 2 to {most}")


def _are_sizes(value: Any, count: int) -> bool:
    numbers = value if isinstance(value, list | tuple) else ()
    return len(numbers) == count and all(isinstance(number, int) and number > 0 for number in numbers)
