"""What `diffcap import` needs to know of one method's official checkpoints."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from diffcap.interop.sizes import Sizes, State
from diffcap.text.vocabularies import AnyLayout

Stage = Literal["pretrain", "finetune"]


def _never(state: State) -> bool:
    return False


@dataclass(frozen=True)
class Importer:
    """How the official checkpoints of a method are read.

    Attributes:
        sizes: from the official parameters, the values of `ImportOptions` and the computed tables to the model's arguments.
        rename: official parameters and the stage -> parameters of our model.
        layout: vocabulary layout of our model.
        vocabulary: name of the authors' file from word to id; None if the method has CLIP's own tokens.
        grouped: whether the file is a dict of groups, one per network, with a pickled configuration.
        is_pretraining: whether official parameters are of the pre-training stage.
    """

    sizes: Callable[[State, Mapping[str, Any], State], Sizes]
    rename: Callable[[dict[str, Tensor], Stage], dict[str, Tensor]]
    layout: AnyLayout
    vocabulary: str | None
    grouped: bool = False
    is_pretraining: Callable[[State], bool] = _never
