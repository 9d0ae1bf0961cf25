"""Counting floating-point operations."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from diffcap.utils.linear import HAS_ONEDNN


def flop_counter() -> FlopCounterMode:
    """torch's counter of floating-point operations, two for each multiplication, that also counts `utils.linear`."""
    more = {torch.ops.mkldnn._linear_pointwise: _linear_flops} if HAS_ONEDNN else {}
    return FlopCounterMode(display=False, custom_mapping=more)


def _linear_flops(x_shape: Sequence[int], weight_shape: Sequence[int], *_: Any, **__: Any) -> int:
    return 2 * math.prod(x_shape) * weight_shape[0]
