"""Convert the checkpoints that the authors of a method released to diffcap's, without running pickled code.

| method | file | vocabulary |
|---|---|---|
| SCORER, DIRL | a pickled dict of `change_detector_state`, `speaker_state` and `model_cfg` | `vocab.json`, word to id |
| IDC-PCL | a state dict of the pre-training or the fine-tuning model | `dict.json`, word to id |
| CLIP4IDC | a state dict, `clip.*` in half precision; stage 2 also has `decoder.*` | CLIP's |
| RSICCformer | a dict of the pickled modules `encoder_image`, `encoder_feat` and `decoder` | `WORDMAP_*.json`, word to id |
| Chg2Cap | a dict of the state dicts `encoder_dict`, `encoder_trans_dict` and `decoder_dict` | `vocab.json`, word to id |

Most hyperparameters follow from the shapes of the weights; `ImportOptions` has the others.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import diffcap
from diffcap.checkpoints.loading import build_captioner, build_pretraining
from diffcap.checkpoints.reading import FORMAT, is_finite
from diffcap.interop.importer import Importer, Stage
from diffcap.records import read_json
from diffcap.registry import get_method, import_object, methods
from diffcap.text.vocabulary import LAYOUTS, LayoutName, Vocabulary
from diffcap.utils.errors import DiffcapError, wrap_errors
from diffcap.utils.unpickling import load_tensors, state_of_module

MAX_SIZE = 4096  # limit of any option that is a size
MIN_LENGTH = 3  # tokens of a caption: start token, one word, end token
# Tables that are computed, not learned, and numbers that some files contain besides the weights.
_COMPUTED = re.compile(
    r"(?:.*\.)?(?:pe|position_ids|attn_mask|num_batches_tracked|input_resolution|context_length|vocab_size)"
)


@dataclass(frozen=True)
class ImportOptions:
    """Hyperparameters that do not follow from the shapes of the weights; None means the authors' value.

    Args:
        heads: number of heads of every attention layer except CLIP's.
        vision_heads: number of heads of CLIP's image tower; None gives each head 64 channels.
        max_length: maximal number of tokens of a caption. None: 24, or the length of the file's position table (SCORER, DIRL);
            40 (PCL); 33 (CLIP4IDC).
        coordinates: whether x and y are appended to the features. None: yes if the number of channels is two more than a
            multiple of four, such as 1026.
        grid: rows and columns of the features of IDC-PCL; None is 7 x 7. Other methods' weights have the grid.
        intra_layers: layers of CLIP4IDC's image tower that encode each image separately; None is three quarters.
        dataset: training dataset.
    """

    heads: int = 8
    vision_heads: int | None = None
    max_length: int | None = None
    coordinates: bool | None = None
    grid: tuple[int, int] | None = None
    intra_layers: int | None = None
    dataset: str = "clevr_change"


def get_importer(method: str) -> Importer:
    """The importer of a method's official checkpoints."""
    path = get_method(method, "method").importer
    if path is None:
        known = ", ".join(name for name, other in methods().items() if other.importer)
        raise DiffcapError(f"{method}: its official checkpoints cannot be imported; methods that can be: {known}.")
    importer: Importer = import_object(path)
    return importer


def read_official(path: str | Path, method: str) -> dict[str, Tensor]:
    """Read the parameters of an official file, in float32, by name, with their group (`Importer.groups`) as prefix."""
    path, importer = Path(path), get_importer(method)
    if path.suffix == ".safetensors":
        from diffcap.features.weights import read_state_dict

        content: Any = read_state_dict(path, "FILE")
    else:
        content = load_tensors(path, importer.pickled_classes)
    if isinstance(content, dict) and not importer.groups:
        for wrapper in ("state_dict", "model_state_dict", "model"):
            if isinstance(content.get(wrapper), dict):
                content = content[wrapper]
                break
    if not isinstance(content, dict):
        raise DiffcapError(
            f"{path}: contains a {type(content).__name__}, not a dict of weights; give the authors' checkpoint."
        )
    groups = {group: content[group] for group in importer.groups if isinstance(content.get(group), dict)}
    with wrap_errors(path, f"not a checkpoint of {method}", "download it again"):  # modules that contain themselves
        groups = {group: state_of_module(part) or part for group, part in groups.items()}
    if groups:
        missing = [group for group in importer.groups if group not in groups]
        if missing:
            raise DiffcapError(f"{path}: {missing[0]!r} is missing; download the authors' checkpoint again.")
        content = {
            f"{group}.{_parameter_name(name)}": value for group, part in groups.items() for name, value in part.items()
        }
    state = {_parameter_name(name): value for name, value in content.items()}
    other = next((name for name, value in state.items() if not isinstance(value, Tensor)), None)
    if other is not None or not state:
        fault = f"{other!r:.80} is not a tensor" if state else "it is empty"
        raise DiffcapError(f"{path}: not a checkpoint of {method} ({fault}); give the authors' checkpoint.")
    state = {name: value.float() if value.is_floating_point() else value for name, value in state.items()}
    if bad := next((name for name, value in state.items() if not is_finite(value)), None):
        raise DiffcapError(
            f"{path}: its weight {bad!r:.80} contains nan or inf; download the file again, or give another checkpoint."
        )
    return state


def _parameter_name(name: Any) -> str:
    return str(name).removeprefix("module.")  # prefix of DataParallel


def read_word_ids(path: str | Path, layout: LayoutName) -> tuple[list[str], list[int]]:
    """Read a vocabulary file, a JSON object from word to id.

    Returns:
        The words without special tokens, and the file's id of each token of the layout's vocabulary, in this one's order.
    """
    ids = read_json(path, "vocabulary", "give the authors' file that maps words to ids")
    if isinstance(ids, dict) and isinstance(ids.get("word_to_idx"), dict):
        ids = ids["word_to_idx"]
    good = isinstance(ids, dict) and all(type(number) is int for number in ids.values())
    if not good or sorted(ids.values()) != list(range(len(ids))):
        raise DiffcapError(f"{path}: not a vocabulary; give a JSON object from each word to its id (0, 1, 2, ...).")
    specials = (*LAYOUTS[layout].specials, *LAYOUTS[layout].last_specials)
    missing = [word for word in specials if word not in ids]
    if missing:
        raise DiffcapError(f"{path}: the special token {missing[0]} is missing; give the vocabulary of this method.")
    words = sorted((word for word in ids if word not in specials), key=lambda word: ids[word])
    return words, [ids[word] for word in Vocabulary(words, layout).tokens]


def import_official(
    path: str | Path, method: str, vocabulary: str | Path | None = None, options: ImportOptions | None = None
) -> dict[str, Any]:
    """Convert an official checkpoint to one of diffcap, see `reading.read_checkpoint`.

    Its stage is "finetune", or "pretrain" for IDC-PCL's pre-training and CLIP4IDC's adaptation.

    Args:
        vocabulary: JSON file from word to id; None for CLIP4IDC.
    """
    options = options or ImportOptions()
    _check_options(options)
    state = read_official(path, method)
    tables = {name: value for name, value in state.items() if name.endswith("pe") and _COMPUTED.fullmatch(name)}
    state = {name: value for name, value in state.items() if not _COMPUTED.fullmatch(name)}
    words, layout, order = _vocabulary(path, method, vocabulary)
    importer = get_importer(method)
    stage: Stage = "pretrain" if importer.is_pretraining(state) else "finetune"
    with wrap_errors(path, f"not a complete checkpoint of {method}", "download it again"):
        sizes = importer.sizes(state, options.__dict__, tables)
        if sizes.max_length < MIN_LENGTH:
            raise ValueError(f"its position table has {sizes.max_length} entries")
    model, features = sizes.model, sizes.features
    if order is not None and len(order) != model["vocabulary_size"]:
        raise DiffcapError(
            f"{vocabulary}: has {len(order)} words, but {path} was trained with {model['vocabulary_size']}; give the vocabulary "
            "of this checkpoint."
        )
    hyperparameters = {
        key: value for key, value in model.items() if stage == "finetune" or key not in sizes.finetune_only
    }
    with wrap_errors(path, f"its weights do not fit {method}", "check the options, or download it again"):
        renamed = importer.rename(state, stage)
        if order is not None and order != list(range(len(order))):
            renamed = _reorder_words(renamed, order)
        checkpoint = {
            "diffcap": {
                "format": FORMAT,
                "version": diffcap.__version__,
                "stage": stage,
                "dataset": options.dataset,
                "manifest_sha256": None,
                "seed": None,
                "words": words,
                "vocabulary_layout": layout,
                "max_length": sizes.max_length,
                "features": features,
                "train_seconds": 0.0,
                "method": method,
                "hyperparameters": hyperparameters,
                "tokenizer": "raw" if options.dataset == "birds2words" else "ptb",
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


def _check_options(options: ImportOptions) -> None:
    for name, minimum in {"heads": 1, "vision_heads": 1, "intra_layers": 1, "max_length": MIN_LENGTH}.items():
        value = getattr(options, name)
        if value is not None and not minimum <= value <= MAX_SIZE:
            raise DiffcapError(f"--{name.replace('_', '-')} is {value}; it must be {minimum} to {MAX_SIZE}.")
    if options.grid is not None and not (min(options.grid) >= 1 and options.grid[0] * options.grid[1] <= MAX_SIZE):
        raise DiffcapError(
            f"--grid is {options.grid[0]} x {options.grid[1]}; both must be at least 1, and their product at most {MAX_SIZE}."
        )


def _vocabulary(
    path: str | Path, method: str, vocabulary: str | Path | None
) -> tuple[list[str], str, list[int] | None]:
    importer = get_importer(method)
    if importer.vocabulary_file is None:
        if vocabulary is not None:
            raise DiffcapError(f"--vocabulary: {get_method(method).title} uses CLIP's tokens; omit the option.")
        return [], importer.vocabulary_layout, None
    if vocabulary is None:
        raise DiffcapError(
            f"{path}: a checkpoint of {method} contains no words; give its {importer.vocabulary_file} as --vocabulary FILE."
        )
    layout: Any = importer.vocabulary_layout
    words, order = read_word_ids(vocabulary, layout)
    return words, layout, order


def _reorder_words(state: dict[str, Tensor], order: Sequence[int]) -> dict[str, Tensor]:
    """Reorder the rows of every parameter that has one row per word."""
    rows = torch.tensor(order)
    layers = "word_embedding.weight", "output_layer.weight", "output_layer.bias"
    tables = (*layers, "decoder.embedding.weight", "decoder.logit.weight", "decoder.logit.bias")
    return {name: value[rows] if name.endswith(tables) else value for name, value in state.items()}
