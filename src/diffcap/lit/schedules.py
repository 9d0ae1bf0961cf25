"""Learning-rate schedules, as functions for `torch.optim.lr_scheduler.LambdaLR`."""

import math
import re
from collections.abc import Callable, Sequence
from typing import Literal

from diffcap.utils.errors import DiffcapError

Schedule = Literal["noam", "piecewise", "step", "cosine", "linear", "constant"]


def in_steps(length: float | str, steps_per_epoch: Callable[[], float], option: str) -> float:
    """Convert a length in epochs ("15ep") to steps; return a number of steps unchanged. `option`: name of the option, for messages.

    Example:
        >>> in_steps("15ep", lambda: 265, "model.milestones")  # SCORER on CLEVR-Change
        3975.0
    """
    if not isinstance(length, str):
        return length
    epochs = re.fullmatch(r"\s*((\d+\.?\d*|\.\d+)(e[+-]?\d+)?)\s*ep", length)
    if epochs is None or not 0 < float(epochs[1]) < math.inf:
        raise DiffcapError(f"{option} is {length!r}; give a number of steps (5000) or of epochs (15ep).")
    return float(epochs[1]) * steps_per_epoch()


def make_lr_lambda(
    schedule: Schedule, *, warmup: float = 0, milestones: Sequence[float] = (10_000, 20_000), total_steps: int = 0
) -> Callable[[int], float]:
    """Return a function that maps the optimiser step (0, 1, ...) to the factor by which the base learning rate is multiplied.

    Args:
        schedule: the shape of the function:
            "noam": linear warm-up over `warmup` steps, then decay with the inverse square root of the step, counted from 1 (IDC-PCL's
            pre-training; the authors' code counts from 0, and takes 1e-8 instead of 0).
            "piecewise": the factor is halved at each milestone (IDC-PCL's fine-tuning).
            "step": the factor is divided by 10 at each milestone (SCORER and DIRL, authors' code).
            "cosine": linear warm-up, then half a cosine that reaches 0 at `total_steps`.
            "linear": linear warm-up, then a straight line that reaches 0 at `total_steps` (CLIP4IDC's captioning, authors' code).
            "constant": linear warm-up, then 1.
        warmup, milestones: numbers of steps; a number below 1 is a fraction of `total_steps`.
        total_steps: number of steps of the training; 0 or less if it is not known.
    """
    has_fractions = 0 < warmup < 1 or (schedule in ("piecewise", "step") and min(milestones, default=1) < 1)
    if total_steps <= 0 and (has_fractions or schedule in ("cosine", "linear")):
        raise DiffcapError(
            f"model.schedule {schedule} with warmup {warmup} and milestones {list(milestones)} depends on trainer.max_steps, which is not "
            "set; set trainer.max_steps, or use another schedule with absolute steps."
        )
    warmup = round(warmup * total_steps) if warmup < 1 else int(warmup)
    milestone_steps = [milestone * total_steps if milestone < 1 else milestone for milestone in milestones]

    def lr_lambda(step: int) -> float:
        warmup_factor = min(1.0, (step + 1) / warmup) if warmup else 1.0
        if schedule == "noam":
            return (step + 1) / warmup if step < warmup else math.sqrt(max(warmup, 1) / (step + 1))
        if schedule in ("piecewise", "step"):
            passed = sum(step >= milestone for milestone in milestone_steps)
            return warmup_factor * (0.5 if schedule == "piecewise" else 0.1) ** passed
        if schedule in ("cosine", "linear"):
            progress = min(1.0, max(0, step - warmup) / max(1, total_steps - warmup))
            return warmup_factor * (1 - progress if schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress)))
        return warmup_factor

    return lr_lambda
