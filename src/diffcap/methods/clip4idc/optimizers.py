"""BertAdam, the optimizer of CLIP4IDC's authors, with half-precision weights.

The default optimizer is `lit.training.adamw` with two learning rates. Unlike AdamW, BertAdam has no bias correction, and its weight decay
also applies to the image type embeddings, to CLIP's layer norms and to `logit_scale`. The authors' code also clips the gradient of
each tensor to a norm of 1. This file leaves that out, because it changes nothing after the clipping of the whole gradient to 1.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn


class BertAdam(torch.optim.Optimizer):
    """Adam without bias correction and with decoupled weight decay: `p -= lr (m / (sqrt(v) + eps) + decay p)`.

    In parameter groups with `half`, weights and moments have float16's precision, and each operation is rounded to it (authors'
    code). The parameters themselves are float32 tensors with rounded values, which the forward pass casts to the trainer's precision.
    float16 has 11 significant bits, so an update below about 1/2048 of a weight is lost. If a gradient is below about 2.4e-4, its
    square is 0 and the step is `m / eps`.
    """

    def __init__(self, groups: list[dict[str, Any]], betas: tuple[float, float], eps: float = 1e-6) -> None:
        super().__init__(groups, {"lr": 1e-4, "weight_decay": 0.0, "half": False, "betas": betas, "eps": eps})
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"] if group["half"] else ():
                    parameter.copy_(parameter.half())

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            dtype = torch.float16 if group["half"] else torch.float32
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    beta1, beta2 = group["betas"]
                    weight = parameter.to(dtype)
                    gradient = parameter.grad.to(dtype)
                    # A resumed optimizer has moments of the parameter's type, with values that float16 represents exactly.
                    mean = state.get("exp_avg", torch.zeros_like(weight)).to(dtype)
                    square = state.get("exp_avg_sq", torch.zeros_like(weight)).to(dtype)
                    # Computed in float32, as on CUDA, because `add` on the CPU would round alpha to float16.
                    mean = mean.mul_(beta1).float().add(gradient.float(), alpha=1 - beta1).to(dtype)
                    square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
                    update = mean / (square.sqrt() + group["eps"])
                    if group["weight_decay"]:
                        update += group["weight_decay"] * weight
                    parameter.copy_(weight - group["lr"] * update)
                    state["exp_avg"], state["exp_avg_sq"] = mean, square
        return loss


def bert_adam(
    module: Any,
    pretrained: Iterable[nn.Parameter],
    lr: float,
    pretrained_lr: float,
    weight_decay: float,
    betas: tuple[float, float],
) -> BertAdam:
    """Return BertAdam with half precision for linear layers, convolutions, attention and projections of CLIP's two towers.

    Biases and the layer norms outside CLIP have no weight decay (authors' code).
    `module`: the captioner of CLIP4IDC, or the model of its pre-training (`Adaptation`). The other arguments are those of `adamw`.
    """
    pretrained_ids = {id(parameter) for parameter in pretrained}
    clip_parts = [part for tower in (module.images, module.words) for part in tower.modules()]
    clip_part_ids = {id(part) for part in clip_parts}
    half_ids = {id(parameter) for parameter in half_precision_parameters(clip_parts)}
    undecayed_ids = {id(parameter) for name, parameter in module.named_parameters() if "bias" in name}
    for part in module.modules():
        if isinstance(part, nn.LayerNorm) and id(part) not in clip_part_ids:
            undecayed_ids |= {id(parameter) for parameter in part.parameters()}
    groups: dict[tuple[float, float, bool], list[nn.Parameter]] = {}
    for parameter in module.parameters():
        if parameter.requires_grad:
            rate = pretrained_lr if id(parameter) in pretrained_ids else lr
            decay = 0.0 if id(parameter) in undecayed_ids else weight_decay
            groups.setdefault((rate, decay, id(parameter) in half_ids), []).append(parameter)
    param_groups = [
        {"params": parameters, "lr": rate, "weight_decay": decay, "half": half}
        for (rate, decay, half), parameters in groups.items()
    ]
    return BertAdam(param_groups, betas)


def half_precision_parameters(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Return the parameters of these modules, without those of their children, that OpenAI's CLIP stores in float16."""
    parameters: list[nn.Parameter] = []
    for module in modules:
        if isinstance(module, nn.Linear | nn.Conv2d | nn.MultiheadAttention):
            parameters += module.parameters(recurse=False)
        for name in ("proj", "text_projection"):
            if isinstance(projection := getattr(module, name, None), nn.Parameter):
                parameters.append(projection)
    return parameters
