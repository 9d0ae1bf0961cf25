"""The authors' released checkpoints as files: read without running them, and turned into checkpoints of ours.

| system | file | vocabulary |
|---|---|---|
| SCORER, DIRL | a pickled dict of `change_detector_state`, `speaker_state`, and `model_cfg` of a class | `vocab.json`, word to id |
| IDC-PCL | a plain state dict of the pre-training or the fine-tuning model | `dict.json`, word to id |
| CLIP4IDC | a plain state dict, `clip.*` in half precision; stage 2 has `decoder.*` beside | CLIP's own |

Sizes are read off the shapes of the weights; `ImportOptions` holds what cannot be.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import diffcap
from diffcap.checkpoints.loading import MAX_SIZE, build_on_meta, captioner_spec
from diffcap.checkpoints.reading import FORMAT, is_finite, weight_fault, weights_of
from diffcap.interop.importer import Importer, Stage
from diffcap.methods import get_method, import_object, methods
from diffcap.records import read_json
from diffcap.text.vocabulary import LAYOUTS, LayoutName
from diffcap.utils.errors import DiffcapError, wrap_errors
from diffcap.utils.unpickling import load_tensors

MIN_LENGTH = 3  # of a caption: to open, a word, to close
GROUPS = ("change_detector_state", "speaker_state")
# Tables that are computed, not learned, and numbers that some files carry beside the weights.
_COMPUTED = re.compile(
    r"(?:.*\.)?(?:pe|position_ids|attn_mask|num_batches_tracked|input_resolution|context_length|vocab_size)"
)


@dataclass(frozen=True)
class ImportOptions:
    """What no weight's shape tells; None where the system's released value is taken.

    Args:
        heads: of every attention but CLIP's own (8). vision_heads: of CLIP's image tower (64 channels each).
        max_length: positions of a caption (SCORER, DIRL: 24, or as the file's table has; PCL: 40; CLIP4IDC: 33).
        coordinates: whether x and y are appended to the features; None: where the channels are two more than a multiple
            of four, as 1026 is.
        grid: rows and columns of the features (PCL: 7 x 7; the other systems' weights tell theirs).
        intra_layers: blocks of CLIP4IDC's image tower that see one image only; three quarters.
        dataset: that it was trained on.
    """

    heads: int = 8
    vision_heads: int | None = None
    max_length: int | None = None
    coordinates: bool | None = None
    grid: tuple[int, int] | None = None
    intra_layers: int | None = None
    dataset: str = "clevr_change"


def get_importer(method: str) -> Importer:
    """How a method's official checkpoints are read.

    Raises:
        DiffcapError: the method is unknown, or nothing reads its authors' checkpoints.
    """
    path = get_method(method, "method").importer
    if path is None:
        known = ", ".join(name for name, other in methods().items() if other.importer)
        raise DiffcapError(f"{method}: its authors' checkpoints cannot be imported; those of {known} can.")
    importer: Importer = import_object(path)
    return importer


def read_official(path: str | Path, method: str) -> dict[str, Tensor]:
    """The parameters of an official file by name, in float32; SCORER's and DIRL's with their group in front.

    Raises:
        DiffcapError: it names anything but tensors, plain containers and the configuration's class, is damaged, or holds
            no weights of such a system.
    """
    path, grouped = Path(path), get_importer(method).grouped
    if path.suffix == ".safetensors":
        from diffcap.features.weights import read_state_dict

        content: Any = read_state_dict(path, "FILE")
    else:
        content = load_tensors(path, ("AttrDict",) if grouped else ())
    if isinstance(content, dict) and not grouped:
        for wrapper in ("state_dict", "model_state_dict", "model"):
            if isinstance(content.get(wrapper), dict):
                content = content[wrapper]
                break
    if not isinstance(content, dict):
        raise DiffcapError(
            f"{path}: holds a {type(content).__name__}, not weights by name; give the authors' checkpoint."
        )
    groups = {group: content[group] for group in GROUPS if isinstance(content.get(group), dict)}
    if grouped and groups:
        missing = [group for group in GROUPS if group not in groups]
        if missing:
            raise DiffcapError(f"{path}: {missing[0]!r} is missing; fetch the authors' checkpoint again.")
        content = {f"{group}.{_plain(name)}": value for group, part in groups.items() for name, value in part.items()}
    state = {_plain(name): value for name, value in content.items()}
    fault = next((f"{name!r:.80} {why}" for name, value in state.items() if (why := weight_fault(value))), "")
    if fault or not state:
        raise DiffcapError(
            f"{path}: not a checkpoint of {method} ({fault or 'it is empty'}); give the authors' checkpoint."
        )
    state = {name: value.float() if value.is_floating_point() else value for name, value in state.items()}
    if bad := next((name for name, value in state.items() if not is_finite(value)), None):
        raise DiffcapError(
            f"{path}: its weight {bad!r:.80} holds nan or inf; fetch the file again, or give another of the authors' checkpoints."
        )
    return state


def _plain(name: Any) -> str:
    return str(name).removeprefix("module.")  # DataParallel's


def read_word_ids(path: str | Path, layout: LayoutName) -> tuple[list[str], list[int]]:
    """The words of a file from word to id.

    Returns:
        The words after the layout's specials; and for each of our ids, the specials in front, the file's.

    Raises:
        DiffcapError: it is no such file, lacks a special token, or ids are missing or stand twice.
    """
    ids = read_json(path, "vocabulary", "give the file from word to id that lies beside the authors' data")
    if isinstance(ids, dict) and isinstance(ids.get("word_to_idx"), dict):
        ids = ids["word_to_idx"]
    good = isinstance(ids, dict) and all(type(number) is int for number in ids.values())
    if not good or sorted(ids.values()) != list(range(len(ids))):
        raise DiffcapError(f"{path}: not a vocabulary, a JSON object from every word to its id, 0, 1, 2 and so on.")
    specials = LAYOUTS[layout].specials
    missing = [word for word in specials if word not in ids]
    if missing:
        raise DiffcapError(f"{path}: its special tokens lack {missing[0]}; give the vocabulary of this very system.")
    words = sorted((word for word in ids if word not in specials), key=lambda word: ids[word])
    return words, [ids[word] for word in (*specials, *words)]


def import_official(
    path: str | Path, method: str, vocabulary: str | Path | None = None, options: ImportOptions | None = None
) -> dict[str, Any]:
    """Turn an official checkpoint into one of ours.

    Args:
        path: the file. vocabulary: word to id, for all systems but CLIP4IDC. options: what no weight tells.

    Returns:
        A checkpoint as `checkpoint.read_checkpoint` gives it: of the stage "finetune", or "pretrain" for IDC-PCL's
        pre-training and CLIP4IDC's adaptation.

    Raises:
        DiffcapError: the file is refused or damaged, or it and the vocabulary do not fit the system.
    """
    options = options or ImportOptions()
    _check_options(options)
    state = read_official(path, method)
    tables = {name: value for name, value in state.items() if name.endswith("pe") and _COMPUTED.fullmatch(name)}
    state = {name: value for name, value in state.items() if not _COMPUTED.fullmatch(name)}
    words, layout, order = _words_of(path, method, vocabulary)
    importer = get_importer(method)
    stage: Stage = "pretrain" if importer.is_pretraining(state) else "finetune"
    with wrap_errors(path, f"not a whole checkpoint of {method}", "fetch it again"):
        sizes = importer.sizes(state, options.__dict__, tables)
        if sizes.max_length < MIN_LENGTH:
            raise ValueError(f"its table has {sizes.max_length} positions of words")
    model, features = sizes.model, sizes.features
    if order is not None and len(order) != model["vocabulary_size"]:
        raise DiffcapError(
            f"{vocabulary}: {len(order)} words, {path} was trained with {model['vocabulary_size']}; give its own vocabulary."
        )
    hyperparameters = {
        key: value for key, value in model.items() if stage == "finetune" or key not in sizes.finetune_only
    }
    with wrap_errors(path, f"its weights do not make a whole {method}", "check the options, or fetch it again"):
        renamed = importer.rename(state, stage)
        if order is not None and order != list(range(len(order))):
            renamed = _reordered(renamed, order)
        made = {
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
            captioner_spec(made)
        else:
            pretraining = get_method(method).pretraining
            assert pretraining is not None
            kind = import_object(pretraining.captioner)
            build_on_meta(kind, hyperparameters, weights_of(made))
    return made


def _check_options(options: ImportOptions) -> None:
    for name, least in {"heads": 1, "vision_heads": 1, "intra_layers": 1, "max_length": MIN_LENGTH}.items():
        value = getattr(options, name)
        if value is not None and not least <= value <= MAX_SIZE:
            raise DiffcapError(f"--{name.replace('_', '-')} is {value}; it must be {least} to {MAX_SIZE}.")
    if options.grid is not None and not (min(options.grid) >= 1 and options.grid[0] * options.grid[1] <= MAX_SIZE):
        raise DiffcapError(
            f"--grid is {options.grid[0]} by {options.grid[1]}; both must be at least 1, and their product at most {MAX_SIZE}."
        )


def _words_of(path: str | Path, method: str, vocabulary: str | Path | None) -> tuple[list[str], str, list[int] | None]:
    importer = get_importer(method)
    if importer.vocabulary is None:
        if vocabulary is not None:
            raise DiffcapError(f"--vocabulary: {get_method(method).title} has CLIP's own tokens; leave it out.")
        return [], importer.layout, None
    if vocabulary is None:
        raise DiffcapError(
            f"{path}: a checkpoint of {method} holds no words; give its {importer.vocabulary} as --vocabulary FILE."
        )
    layout: Any = importer.layout
    words, order = read_word_ids(vocabulary, layout)
    return words, layout, order


def _reordered(state: dict[str, Tensor], order: Sequence[int]) -> dict[str, Tensor]:
    """Rows of words in our order: those of every table, matrix or bias that has one row a word at our names."""
    rows = torch.tensor(order)
    layers = "word_embedding.weight", "output_layer.weight", "output_layer.bias"
    tables = (*layers, "decoder.embedding.weight", "decoder.logit.weight", "decoder.logit.bias")
    return {name: value[rows] if name.endswith(tables) else value for name, value in state.items()}
