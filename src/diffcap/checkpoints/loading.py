"""What a captioner's checkpoint alone holds: the model, its words, the features that it reads."""

from pathlib import Path
from typing import Any, NamedTuple

from diffcap.checkpoints.reading import CAPTIONING_STAGES, read_checkpoint, weights_of
from diffcap.errors import DiffcapError
from diffcap.models.captioner import Captioner
from diffcap.models.clip4idc import CLIP4IDC
from diffcap.models.dirl import DIRL
from diffcap.models.pcl import PCL
from diffcap.models.scorer import SCORER
from diffcap.text.layouts import AnyVocabulary, vocabulary_of

METHODS: dict[str, type[Captioner]] = {"pcl": PCL, "scorer": SCORER, "dirl": DIRL, "clip4idc": CLIP4IDC}


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
    if facts.get("method") not in METHODS:
        raise DiffcapError(
            f"{path}: its method is {facts.get('method')!r}, this diffcap knows {', '.join(METHODS)}; "
            f"use diffcap {facts['version']}, which wrote it."
        )
    try:
        captioner = METHODS[facts["method"]](**facts.pop("hyperparameters"))
        vocabulary = vocabulary_of(facts.pop("words"), facts.pop("vocabulary_layout", "pcl"))
        max_length, features = int(facts.pop("max_length")), dict(facts.pop("features"))
    except (TypeError, ValueError, KeyError) as error:
        raise DiffcapError(
            f"{path}: its settings are of another diffcap ({error}); use diffcap {facts['version']}, which wrote it."
        ) from None
    try:
        captioner.load_state_dict(weights_of(state))
    except RuntimeError as error:
        fault = " ".join(str(error).split())[:200]
        raise DiffcapError(f"{path}: its weights do not fit its own settings ({fault}); train it again.") from None
    facts["step"] = state["global_step"]
    return Checkpoint(captioner.eval(), vocabulary, max_length, features, facts)
