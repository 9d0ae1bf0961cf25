"""Import official checkpoints without running pickled code. An official checkpoint is one that the authors of a method released.

Each method has an `Importer`. Most hyperparameters follow from the shapes of the weights; `ImportOptions` has the others.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import torch
from jsonargparse import ArgumentParser
from torch import Tensor

import diffcap
from diffcap.checkpoints.loading import build_captioner, build_pretraining
from diffcap.checkpoints.reading import FORMAT, is_finite
from diffcap.datasets.registry import RELEASED_CHECKPOINTS_DATASET, get_dataset
from diffcap.features.preprocessing import ResizeNormalize, ResizeOnly
from diffcap.records import read_json
from diffcap.registry import get_method, import_object, methods
from diffcap.text.vocabularies import AnyLayout
from diffcap.text.vocabulary import LAYOUTS, LayoutName, Vocabulary
from diffcap.utils.errors import DiffcapError, wrap_errors
from diffcap.utils.unpickling import load_tensors, state_of_module

State = Mapping[str, Tensor]  # name of a parameter -> its value
Stage = Literal["pretrain", "finetune"]
Rule = tuple[str, str | None]  # (regular expression for official names, new name); None drops the parameter
# Names of values that are not learned: computed tables, such as position encodings ("pe"), and numbers, such as the image size.
_COMPUTED_NAME = re.compile(r"(?:.*\.)?(?:pe|position_ids|attn_mask|input_resolution|context_length|vocab_size)")


class Sizes(NamedTuple):
    """The hyperparameters of a checkpoint, most of them from the shapes of its weights."""

    model: dict[str, Any]  # constructor arguments of diffcap's model
    max_length: int  # maximal number of tokens of a caption
    features: dict[str, Any]  # metadata of the image features that the model reads: network, preprocessing, shape, ...


@dataclass(frozen=True)
class Importer:
    """How to read the official checkpoints of a method."""

    # Takes the official parameters and buffers, `ImportOptions`, and the options that only this method has (as keyword arguments).
    sizes: Callable[..., Sizes]
    # Takes the official parameters and the stage, and returns the state dict of diffcap's model.
    rename: Callable[[dict[str, Tensor], Stage], dict[str, Tensor]]
    vocabulary_layout: AnyLayout  # name of the special tokens and of the order of ids in diffcap's model, such as "rcc"
    vocabulary_file: str | None  # the authors' file that maps words to ids; None if the method uses CLIP's tokens
    # If a file is a dict of several networks: their keys, which become prefixes of the parameters' names. Empty for one network.
    groups: tuple[str, ...] = ()
    pickled_classes: tuple[str, ...] = ()  # names of the classes that the file may use besides those of tensors
    is_pretraining: Callable[[State], bool] = lambda state: False  # True for the weights of a pre-training


@dataclass(frozen=True)
class ImportOptions:
    """Hyperparameters that do not follow from the shapes of the weights. None means the value that the authors used."""

    heads: int = 8  # number of heads of every attention layer, except the layers of a pretrained image tower
    max_length: int | None = None  # maximal number of tokens of a caption
    dataset: str = RELEASED_CHECKPOINTS_DATASET  # name of the dataset that the checkpoint was trained on
    of_method: Mapping[str, Any] = field(default_factory=dict)  # options that only one method has, for `Importer.sizes`


def get_importer(method: str) -> Importer:
    """Return the importer of a method's official checkpoints."""
    path = get_method(method, "method").importer  # "module:object"; errors call the argument "method"
    if path is None:
        importable = ", ".join(name for name, other in methods().items() if other.importer)
        raise DiffcapError(f"{method}: its official checkpoints cannot be imported; methods that can be: {importable}.")
    importer: Importer = import_object(path)
    return importer


def read_official(path: str | Path, method: str) -> dict[str, Tensor]:
    """Read an official file. Return its parameters by name, in float32; the keys in `Importer.groups` are prefixes of the names."""
    path, importer = Path(path), get_importer(method)
    if path.suffix == ".safetensors":
        from diffcap.features.weights import read_state_dict

        content: Any = read_state_dict(path, "FILE")  # messages name the argument FILE of `diffcap import`
    else:
        content = load_tensors(path, importer.pickled_classes)
    if isinstance(content, dict) and not importer.groups:
        wrappers = ("state_dict", "model_state_dict", "model")
        content = next((content[name] for name in wrappers if isinstance(content.get(name), dict)), content)
    if not isinstance(content, dict):
        raise DiffcapError(
            f"{path}: contains a {type(content).__name__}, not a dict of weights; give the authors' checkpoint."
        )
    if missing := [group for group in importer.groups if not isinstance(content.get(group), dict)]:
        raise DiffcapError(
            f"{path}: not a checkpoint of {method} ({missing[0]!r} is missing); give the authors' checkpoint."
        )
    if importer.groups:
        # `state_of_module` raises a RecursionError if a module contains itself.
        with wrap_errors(path, f"not a checkpoint of {method}", "download it again"):
            content = {
                f"{group}.{str(name).removeprefix('module.')}": value
                for group in importer.groups
                for name, value in (state_of_module(content[group]) or content[group]).items()
            }
    state = {str(name).removeprefix("module."): value for name, value in content.items()}  # DataParallel adds "module."
    non_tensor = next((name for name, value in state.items() if not isinstance(value, Tensor)), None)
    if non_tensor is not None or not state:
        fault = f"{non_tensor!r:.80} is not a tensor" if state else "it is empty"
        raise DiffcapError(f"{path}: not a checkpoint of {method} ({fault}); give the authors' checkpoint.")
    state = {name: value.float() if value.is_floating_point() else value for name, value in state.items()}
    if infinite := next((name for name, value in state.items() if not is_finite(value)), None):
        raise DiffcapError(
            f"{path}: its weight {infinite!r:.80} contains nan or inf; download the file again, or give another checkpoint."
        )
    return state


def read_word_ids(path: str | Path, layout: LayoutName) -> tuple[list[str], list[int]]:
    """Read a vocabulary file, which is a JSON object from word to id.

    Returns:
        The words without special tokens, and a list of ids: entry i is the id that token i of diffcap's vocabulary has in the file.
    """
    ids = read_json(path, "vocabulary", "give the authors' file that maps words to ids")
    if isinstance(ids, dict) and isinstance(ids.get("word_to_idx"), dict):
        ids = ids["word_to_idx"]
    has_ids = isinstance(ids, dict) and all(type(number) is int for number in ids.values())
    if not has_ids or sorted(ids.values()) != list(range(len(ids))):
        raise DiffcapError(f"{path}: not a vocabulary; give a JSON object from each word to its id (0, 1, 2, ...).")
    specials = (*LAYOUTS[layout].specials, *LAYOUTS[layout].last_specials)
    if missing := [word for word in specials if word not in ids]:
        raise DiffcapError(f"{path}: the special token {missing[0]} is missing; give the vocabulary of this method.")
    words = sorted((word for word in ids if word not in specials), key=lambda word: ids[word])
    return words, [ids[word] for word in Vocabulary(words, layout).tokens]


def import_official(
    path: str | Path, method: str, vocabulary: str | Path | None = None, options: ImportOptions | None = None
) -> dict[str, Any]:
    """Convert an official checkpoint to the content of a diffcap checkpoint, which is a dict as returned by `read_checkpoint`.

    The stage is "pretrain" (IDC-PCL's pre-training, CLIP4IDC's adaptation) or "finetune". `vocabulary` is a file for `read_word_ids`.
    """
    options = options or ImportOptions()
    importer = get_importer(method)
    parser = ArgumentParser(exit_on_error=False)
    known_options = parser.add_function_arguments(importer.sizes, skip={2})  # skips the weights and `ImportOptions`
    with wrap_errors("--options", f"not valid for {method}", f"its options are: {', '.join(known_options) or 'none'}"):
        own_options = parser.parse_object(dict(options.of_method)).as_dict()
    state = read_official(path, method)
    if (vocabulary is None) != (importer.vocabulary_file is None):
        advice = f"contains no words; give its {importer.vocabulary_file} as --vocabulary FILE"
        if vocabulary is not None:
            advice = "has CLIP's tokens; omit the option --vocabulary"
        raise DiffcapError(f"{path}: a checkpoint of {method} {advice}.")
    layout = cast(LayoutName, importer.vocabulary_layout)
    words, official_ids = ([], None) if vocabulary is None else read_word_ids(vocabulary, layout)
    stage: Stage = "pretrain" if importer.is_pretraining(state) else "finetune"
    with wrap_errors(path, f"not a complete checkpoint of {method}", "download it again"):
        sizes = importer.sizes(state, options, **own_options)
    model = sizes.model
    if official_ids is not None and len(official_ids) != model["vocabulary_size"]:
        raise DiffcapError(
            f"{vocabulary}: has {len(official_ids)} words, but {path} was trained with {model['vocabulary_size']}; give the vocabulary "
            "of this checkpoint."
        )
    with wrap_errors(path, f"its weights do not fit {method}", "check the options, or download it again"):
        learned = {name: value for name, value in state.items() if not _COMPUTED_NAME.fullmatch(name)}
        renamed = importer.rename(learned, stage)
        if official_ids is not None and official_ids != list(range(len(official_ids))):
            # In each parameter with one row per word, the new row i is the official row `official_ids[i]`.
            layers = "word_embedding.weight", "output_layer.weight", "output_layer.bias"
            endings = (*layers, "decoder.embedding.weight", "decoder.logit.weight", "decoder.logit.bias")
            rows = torch.tensor(official_ids)
            renamed = {name: value[rows] if name.endswith(endings) else value for name, value in renamed.items()}
        checkpoint = {
            "diffcap": {
                "format": FORMAT,
                "version": diffcap.__version__,
                "stage": stage,
                "dataset": options.dataset,
                "manifest_sha256": None,
                "seed": None,
                "words": words,
                "vocabulary_layout": importer.vocabulary_layout,
                "max_length": sizes.max_length,
                "features": sizes.features,
                "train_seconds": 0.0,
                "method": method,
                "hyperparameters": model,
                "tokenizer": get_dataset(options.dataset).tokenizer,
                "imported_from": Path(path).name,
            },
            "state_dict": {f"captioner.{name}": value.contiguous() for name, value in renamed.items()},
            "global_step": 0,
        }
        if stage == "finetune":
            build_captioner(checkpoint, path)
        else:
            build_pretraining(checkpoint)
    return checkpoint


def rename(state: Mapping[str, Tensor], rules: Sequence[Rule], method: str) -> dict[str, Tensor]:
    """Rename official parameters, concatenate query, key and value layers, and reshape 1 x 1 convolutions to matrices.

    Args:
        rules: (pattern, new name). A pattern matches a full name, or a name without ".weight" or ".bias". The new name None drops the
            parameter. Parameters with the new names `x:query`, `x:key` and `x:value` (or `x:q`, ...) are concatenated to `x`.
        method: title of the method, for messages.
    """
    renamed: dict[str, Tensor] = {}
    attention_parts: dict[str, dict[int, Tensor]] = {}  # new name -> its query, key and value (0, 1, 2)
    for official_name, value in state.items():
        module, _, ending = official_name.rpartition(".")
        layer = module if ending in ("weight", "bias") else ""
        matches = [(match, new_name) for pattern, new_name in rules if (match := re.fullmatch(pattern, layer))]
        matches += [(match, new_name) for pattern, new_name in rules if (match := re.fullmatch(pattern, official_name))]
        if not matches:
            raise DiffcapError(
                f"official {method} checkpoint: parameter {official_name!r} is unknown; check that the checkpoint belongs to this method."
            )
        match, new_name = matches[0]
        if new_name is None:
            continue
        is_full_name = match.group(0) == official_name
        prefix, _, part_name = match.expand(new_name).partition(":")
        name = prefix if is_full_name else f"{prefix}.{ending}"
        value = value.flatten(1) if value.ndim == 4 and value.shape[2:] == (1, 1) else value
        if part_name:
            attention_parts.setdefault(name, {})["qkv".index(part_name[0])] = value
        else:
            renamed[name] = value
    for name, parts in attention_parts.items():
        if len(parts) != 3:
            raise DiffcapError(
                f"official {method} checkpoint: a query, key or value of {name!r} is missing; download the file again."
            )
        renamed[name] = torch.cat([parts[number] for number in range(3)])
    return renamed


def count_layers(state: State, pattern: str) -> int:
    """Count the layers in the names of parameters. The first group of the regular expression `pattern` matches the index of a layer."""
    indices = {int(match[1]) for name in state if (match := re.match(pattern, name))}
    if indices and max(indices) >= len(indices):
        raise ValueError(f"there are {len(indices)} layers, but one has the number {max(indices)}")
    return len(indices)


def resnet_features(
    layer: str,
    shape: tuple[int, int, int],
    preprocess: ResizeNormalize | ResizeOnly | None = None,
    pool: tuple[int, int] | None = None,
) -> dict[str, Any]:
    """Return the metadata of features of a `layer` of torchvision's ResNet-101; `shape` (C, h, w) is after average pooling to `pool`."""
    preprocess = preprocess or ResizeNormalize()
    return {
        "name": f"resnet101_{layer}",
        "library": "torchvision",
        "network": "resnet101",
        "stage": layer,
        "weights_sha256": None,  # the authors publish no hash
        "preprocessing": json.loads(json.dumps(preprocess.describe())),
        "pool": None if pool is None else list(pool),
        "shape": list(shape),
        "dtype": "float16",
    }


def pixel_features(size: tuple[int, int]) -> dict[str, Any]:
    """Return the metadata of features that are the pixels of images with this `size`, (height, width)."""
    pixels = {"name": "pixels", "library": "pixels", "network": None, "stage": None, "dtype": "uint8"}
    return {**resnet_features("", (3, *size), ResizeOnly(size)), **pixels}
