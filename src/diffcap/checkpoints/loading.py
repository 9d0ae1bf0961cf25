"""What a captioner's checkpoint alone holds: the model, its words, the features that it reads."""

from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._pytree import tree_leaves

from diffcap.checkpoints.reading import CAPTIONING_STAGES, read_checkpoint, weights_of
from diffcap.errors import DiffcapError, told_of
from diffcap.models.captioner import Captioner
from diffcap.models.clip4idc import CLIP4IDC
from diffcap.models.dirl import DIRL
from diffcap.models.pcl import PCL
from diffcap.models.scorer import SCORER
from diffcap.text.layouts import AnyLayout, AnyVocabulary, vocabulary_of

METHODS: dict[str, type[Captioner]] = {"pcl": PCL, "scorer": SCORER, "dirl": DIRL, "clip4idc": CLIP4IDC}
_USUAL = 4096  # a size that any captioner may have


class Checkpoint(NamedTuple):
    """What a fine-tuning checkpoint holds.

    Attributes:
        captioner: in eval mode, on the CPU. vocabulary: its words. max_length: positions of a caption.
        features: meta of the feature store it was trained on (backbone, weights, preprocessing, name).
        facts: method, dataset, step, provenance.
    """

    captioner: Captioner
    vocabulary: AnyVocabulary
    max_length: int
    features: dict[str, Any]
    facts: dict[str, Any]


def load(path: str | Path) -> Checkpoint:
    """Build the captioner of a fine-tuning checkpoint.

    Raises:
        DiffcapError: as `read_checkpoint`, or it is of a pre-training stage.
    """
    state = read_checkpoint(path)
    facts = dict(state["diffcap"])
    if facts.get("stage") not in CAPTIONING_STAGES:
        raise DiffcapError(
            f"{path}: a checkpoint of the {facts.get('stage')} stage cannot caption; fine-tune from it first."
        )
    if facts.get("method") not in list(METHODS):  # a list is hashed by nothing
        raise DiffcapError(
            f"{path}: its method is {facts.get('method')!r:.80}, this diffcap knows {', '.join(METHODS)}; "
            f"use diffcap {facts['version']}, which wrote it."
        )
    weights = weights_of(state)
    with told_of(
        path, "its settings are of another diffcap, or damaged", f"use diffcap {facts['version']}, which wrote it"
    ):
        settings = dict(facts.pop("hyperparameters"))
        vocabulary = _vocabulary(facts.pop("words"), facts.pop("vocabulary_layout", "pcl"), settings)
        _check_sizes(settings, weights)
        captioner = METHODS[facts["method"]](**settings)
        max_length, features = int(facts.pop("max_length")), dict(facts.pop("features"))
        _check_reads(captioner, max_length, features)
    with told_of(path, "its weights do not fit its own settings", "train it again"):
        captioner.load_state_dict(weights)
    facts["step"] = state["global_step"]
    return Checkpoint(captioner.eval(), vocabulary, max_length, features, facts)


def _vocabulary(words: Any, layout: AnyLayout, settings: dict[str, Any]) -> AnyVocabulary:
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise ValueError("its words are no list of texts")
    vocabulary = vocabulary_of(words, layout)
    if len(vocabulary) < settings["vocabulary_size"]:
        raise ValueError(
            f"it has {len(vocabulary)} words, special ones included, for a vocabulary_size of {settings['vocabulary_size']}"
        )
    return vocabulary


def _check_sizes(settings: dict[str, Any], weights: dict[str, Tensor]) -> None:
    """Numbers far beyond the weights' own are refused before any memory is asked for."""
    largest = max([_USUAL, *(side for value in weights.values() for side in value.shape)])
    beyond = [value for value in tree_leaves(settings) if isinstance(value, int) and value > largest]
    if beyond:
        raise ValueError(f"one of its sizes is {beyond[0]}")


def _check_reads(captioner: Captioner, max_length: int, features: dict[str, Any]) -> None:
    """The features must be such as the captioner reads, and its captions no longer than it has positions for."""
    settings, shape = captioner.hyperparameters, features["shape"]
    if not _are_sizes(shape, 3):
        raise ValueError(f"the shape of its features is {shape!r:.80}")
    if features.get("pool") is not None and not _are_sizes(features["pool"], 2):
        raise ValueError(f"its features are pooled to {features['pool']!r:.80}")
    if features.get("library") == "pixels" and not _are_sizes(features["preprocessing"]["size"], 2):
        raise ValueError("it reads pixels and does not say of which size")
    if isinstance(captioner, CLIP4IDC):
        wanted = [3, *captioner.images.image_size]
    else:
        wanted = [settings["feature_channels"], *settings.get("grid", shape[1:])]
    if list(shape) != wanted:
        raise ValueError(f"it reads features of shape {wanted}, and says {list(shape)}")
    most = settings.get("max_length", settings.get("positions", max_length))
    if not 2 <= max_length <= most:
        raise ValueError(f"its captions have {max_length} positions, of 2 to {most}")


def _are_sizes(value: Any, count: int) -> bool:
    numbers = value if isinstance(value, list | tuple) else ()
    return len(numbers) == count and all(isinstance(number, int) and number > 0 for number in numbers)
