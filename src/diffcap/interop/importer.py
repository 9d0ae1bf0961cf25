"""`Importer`, the description of a method's official checkpoints for `diffcap import`."""

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
    """How to read the official checkpoints of a method.

    Attributes:
        sizes: function of the official parameters, the values of `ImportOptions` and the computed tables; returns the
            arguments of diffcap's model.
        rename: function of the official parameters and the stage; returns the state dict of diffcap's model.
        layout: vocabulary layout of diffcap's model.
        vocabulary: name of the authors' file that maps words to ids; None if the method uses CLIP's tokens.
        groups: keys of the file if it is a dict with one group of parameters per network (and a pickled configuration); their
            parameters get the key as prefix. Empty if the file is one state dict.
        pickled_classes: names of the classes that the file may use, besides those of tensors; see `load_tensors`. A group may be
            a pickled module instead of a state dict.
        is_pretraining: whether official parameters belong to the pre-training stage.
    """

    sizes: Callable[[State, Mapping[str, Any], State], Sizes]
    rename: Callable[[dict[str, Tensor], Stage], dict[str, Tensor]]
    layout: AnyLayout
    vocabulary: str | None
    groups: tuple[str, ...] = ()
    pickled_classes: tuple[str, ...] = ()
    is_pretraining: Callable[[State], bool] = _never
