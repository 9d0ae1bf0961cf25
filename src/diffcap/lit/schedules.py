"""Learning-rate schedules as factors of the base rate."""

import math
from collections.abc import Callable, Sequence
from typing import Literal

from diffcap.errors import DiffcapError

Schedule = Literal["noam", "piecewise", "step", "cosine", "linear", "constant"]


def factor(
    kind: Schedule, *, warmup: float = 0, milestones: Sequence[float] = (10_000, 20_000), total: int = 0
) -> Callable[[int], float]:
    """The factor at every optimiser step, from 0.

    Args:
        kind: "noam": rises linearly over `warmup` steps, then falls with the inverse square root (IDC-PCL's
            pre-training, authors' code, which counts steps from 0 with 1e-8 there; here from 1); "piecewise": halves at
            each milestone (its fine-tuning); "step": falls to a tenth at each milestone (SCORER and DIRL, authors'
            code); "cosine": linear warm-up, then half a cosine to 0 at `total`; "linear": the same with a straight line
            (CLIP4IDC's captioning, authors' code); "constant": after the warm-up.
        warmup, milestones, total: in steps; a warm-up or milestone below 1 is a part of `total`.

    Raises:
        DiffcapError: a part of a `total` that is not known.
    """
    if kind in ("piecewise", "step") and total <= 0 and any(milestone < 1 for milestone in milestones):
        raise DiffcapError(
            f"model.milestones {list(milestones)} are parts of trainer.max_steps, which is not set; set it, or give steps."
        )
    if 0 < warmup < 1 and total <= 0:
        raise DiffcapError(
            f"model.warmup {warmup} is a part of trainer.max_steps, which is not set; set it, or give steps."
        )
    warmup = round(warmup * total) if warmup < 1 else int(warmup)
    places = [milestone * total if milestone < 1 else milestone for milestone in milestones]

    def rate(step: int) -> float:
        rising = min(1.0, (step + 1) / warmup) if warmup else 1.0
        if kind == "noam":
            return (step + 1) / warmup if step < warmup else math.sqrt(max(warmup, 1) / (step + 1))
        if kind in ("piecewise", "step"):
            return rising * (0.5 if kind == "piecewise" else 0.1) ** sum(step >= place for place in places)
        if kind in ("cosine", "linear"):
            done = min(1.0, max(0, step - warmup) / max(1, total - warmup))
            return rising * (1 - done if kind == "linear" else 0.5 * (1 + math.cos(math.pi * done)))
        return rising

    return rate
