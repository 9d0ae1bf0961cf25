"""Load a captioner from its checkpoint alone: the model, its vocabulary, and the description of the features that it reads."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from jsonargparse import ArgumentParser

import diffcap
from diffcap.checkpoints.base_models import names_base_model
from diffcap.checkpoints.hub_access import check_repository_name, hub_errors, is_repository_name
from diffcap.checkpoints.reading import CAPTIONING_STAGES, CONFIG, WEIGHTS, read_checkpoint, remedy, weights_of
from diffcap.models.captioner import Captioner
from diffcap.registry import base_model_function, import_object, methods
from diffcap.run_folder import METRICS
from diffcap.text.vocabularies import AnyVocabulary, restore_vocabulary
from diffcap.utils.errors import DiffcapError, wrap_errors

PNG_GLOB = "*.png"  # images of the model card, in the top folder of a repository on the Hub


class Checkpoint(NamedTuple):
    """A captioner from its checkpoint, with the other entries of the checkpoint."""

    captioner: Captioner  # in eval mode, on the CPU
    vocabulary: AnyVocabulary
    max_length: int  # maximal number of tokens of a caption, special tokens included
    features: dict[str, Any]  # metadata of the features that the captioner reads (backbone, weights, name, ...)
    metadata: dict[str, Any]  # the other entries of the checkpoint (method, dataset, seed, version, ...), and "step"


class MissingBaseModel(DiffcapError):
    """The base model of a checkpoint is a local folder that is not on this machine."""


def load(
    path: str | Path, base: str | Path | None = None, prompt: str | None = None, **zero_shot_options: Any
) -> Checkpoint:
    """Build a captioner from a fine-tuning checkpoint, or from a vision-language model without training.

    Args:
        path: a checkpoint's file, an exported folder or a vision-language model; or the `user/name` of one of these on the Hub.
        base: folder or name of the vision-language model on which the captioner was trained, if it has moved.
        prompt: question to a vision-language model without training.
        zero_shot_options: for such a model, the number of `sentences` that a caption has, and the `max_length` of an answer.
    """
    if names_base_model(path):
        if base is not None:
            raise DiffcapError(f"{path}: is a base model itself; remove --base.")
        return base_model_function("zero_shot")(path, prompt, **zero_shot_options)  # a function of the method vlm
    if prompt is not None:
        raise DiffcapError(
            f"{path}: was trained with its own prompt; --prompt is for vision-language models without training."
        )
    path = fetch_if_on_hub(path)
    content = read_checkpoint(path)
    metadata = dict(content["diffcap"])
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
    advice = remedy(Path(path))
    if metadata["version"] != diffcap.__version__:
        advice = f"use diffcap {version}, which wrote it, or train it again"
    with wrap_errors(path, f"diffcap {diffcap.__version__} cannot build its captioner", advice):
        captioner, vocabulary = build_captioner(content, path, base)
    max_length, features = metadata.pop("max_length"), metadata.pop("features")
    for key in ("hyperparameters", "words", "vocabulary_layout"):
        metadata.pop(key, None)
    metadata["step"] = content["global_step"]
    return Checkpoint(captioner.eval(), vocabulary, max_length, features, metadata)


def pull(name: str, folder: str | Path | None = None) -> Path:
    """Download a captioner from the Hub to `folder`, or to the Hub's cache if `folder` is None. Return the folder with the files."""
    check_repository_name(name)
    from huggingface_hub import snapshot_download

    patterns = [CONFIG, WEIGHTS, METRICS, "README.md", PNG_GLOB]
    with hub_errors(name):
        target = Path(snapshot_download(name, local_dir=folder, allow_patterns=patterns))
    for file in (CONFIG, WEIGHTS):
        if not (target / file).is_file():
            raise DiffcapError(f"{name}: not a captioner of diffcap, {file} is missing; check the name on the Hub.")
    return target


def fetch_if_on_hub(source: str | Path) -> str | Path:
    """If `source` is the name of a captioner on the Hub, download it and return its folder. Return any other source unchanged."""
    is_local = not isinstance(source, str) or source.endswith(".ckpt") or Path(source).exists()
    return source if is_local or not is_repository_name(str(source)) else pull(str(source))


def retrieval_function(path: str | Path) -> Callable[..., None]:
    """Return the function that evaluates retrieval (captions for pairs, and pairs for captions) with a pre-training's checkpoint."""
    metadata = read_checkpoint(path, mapped=True)["diffcap"]
    method = methods().get(str(metadata.get("method")))
    pretraining = method.pretraining if method else None
    if metadata["stage"] != "pretrain" or pretraining is None or not pretraining.retrieval:
        raise DiffcapError(
            f"{path}: not a checkpoint of a pre-training that learns retrieval; give best.ckpt of such a pre-training."
        )
    evaluate: Callable[..., None] = import_object(pretraining.retrieval)
    return evaluate


def build_pretraining(content: dict[str, Any]) -> Any:
    """Build the model of a pre-training from what `read_checkpoint` returns. Content that does not fit can raise any error."""
    pretraining = methods()[content["diffcap"]["method"]].pretraining
    assert pretraining is not None
    model = import_object(pretraining.captioner)(**content["diffcap"]["hyperparameters"])
    model.load_state_dict(weights_of(content))
    return model


def build_captioner(
    content: dict[str, Any], path: str | Path, base: str | Path | None = None
) -> tuple[Captioner, AnyVocabulary]:
    """Build a captioner and its vocabulary from what `read_checkpoint` returns. Content that does not fit can raise any error."""
    metadata = content["diffcap"]
    captioner_class: type[Captioner] = import_object(methods()[metadata["method"]].captioner)
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(captioner_class)
    arguments = parser.parse_object(metadata["hyperparameters"]).as_dict()  # the parser checks the types
    if captioner_class.on_base_model:  # the checkpoint may store only the trained weights
        captioner_class.check_state(arguments, weights_of(content))  # before the base model is loaded
        if base is not None:
            arguments |= {"base": str(base), "revision": None if Path(base).is_dir() else arguments["revision"]}
        elif not Path(arguments["base"]).is_dir() and not is_repository_name(arguments["base"]):
            raise MissingBaseModel(
                f"{path}: its base model {arguments['base']} is not on this machine; give its folder as --base FOLDER to diffcap caption, "
                "eval, export or serve."
            )
    elif base is not None:
        raise DiffcapError(f"{path}: its captioner has no base model; remove --base.")
    else:
        vocabulary = restore_vocabulary(metadata["words"], metadata["vocabulary_layout"])
        if len(vocabulary) < arguments["vocabulary_size"]:
            raise ValueError(
                f"it has {len(vocabulary)} words, special tokens included, but vocabulary_size is {arguments['vocabulary_size']}"
            )
    captioner: Any = captioner_class(**arguments)
    captioner.load_state_dict(weights_of(content))
    if captioner_class.on_base_model:
        return captioner, captioner.vocabulary
    if vocabulary.family != captioner.vocabulary_layout:  # layouts of one family have the same special tokens
        raise ValueError(f"its vocabulary_layout is {vocabulary.layout}, not {captioner.vocabulary_layout}")
    # The captioner must read features of the shape (C, h, w) and have positions for captions of `max_length` tokens.
    hyperparameters, max_length = captioner.hyperparameters, metadata["max_length"]
    shape = metadata["features"]["shape"]
    limit = hyperparameters.get("max_length", hyperparameters.get("positions", max_length))
    if not 2 <= max_length <= limit:
        raise ValueError(f"its max_length is {max_length}; it must be from 2 to {limit}")
    image_tower = getattr(captioner, "images", None)
    if image_tower is not None:  # the captioner reads pixels
        expected = [3, *image_tower.image_size]
    else:
        expected = [hyperparameters.get("feature_channels", shape[0]), *hyperparameters.get("grid", shape[1:])]
    if shape != expected:
        raise ValueError(f"its features have shape {shape}, but the captioner reads {expected}")
    return captioner, vocabulary
