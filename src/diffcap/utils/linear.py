"""Linear layers of float32 on the CPU, computed by the faster of torch's libraries MKL and oneDNN, and a counter of operations."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

MIN_PRODUCTS = 1 << 22  # with fewer multiplications, a call of oneDNN costs more time than it saves
HAS_ONEDNN = hasattr(torch.ops.mkldnn, "_linear_pointwise")  # False if torch was built without oneDNN
USE_ONEDNN = HAS_ONEDNN and torch.backends.cpu.get_cpu_capability() == "AVX512"  # for float32 linear layers


def is_float32_on_cpu(x: Tensor) -> bool:
    """Return whether functions for float32 on the CPU may be used with `x`. Under autocast they may not: it uses another type."""
    return x.device.type == "cpu" and x.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `F.linear(x, weight, bias)` for x (..., D), weight (O, D) and bias (O,). On processors with AVX-512, oneDNN computes it.

    For float32, torch uses MKL. oneDNN takes half the time on an AMD processor with AVX-512 (docs/speed.md), and gives no second
    derivatives.
    """
    if not linear_is_faster(x, weight):
        return F.linear(x, weight, bias)
    # The shape is changed here, because the result of `_Linear` could not be changed in place if it were a view.
    rows = x.reshape(-1, x.shape[-1])
    result = _Linear.apply(rows, weight, bias) if torch.is_grad_enabled() else _onednn_linear(rows, weight, bias)
    return result.view(*x.shape[:-1], len(weight))


def linear_is_faster(x: Tensor, weight: Tensor) -> bool:
    """Return whether `linear` supports this input and this weight, and oneDNN is faster than MKL."""
    if not USE_ONEDNN or not is_float32_on_cpu(x) or weight.dtype != torch.float32:
        return False
    has_right_shape = x.shape[-1] == weight.shape[1]  # otherwise torch's error is clearer than oneDNN's
    return has_right_shape and x.numel() * len(weight) >= MIN_PRODUCTS


def _onednn_linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `F.linear` of a matrix (n, D), computed by oneDNN."""
    return torch.ops.mkldnn._linear_pointwise(_without_gaps(rows), _without_gaps(weight), bias, "none", [], "")


def _without_gaps(matrix: Tensor) -> Tensor:
    """Return the matrix without gaps between its rows or columns; with gaps, oneDNN is a thousand times slower."""
    return matrix if matrix.is_contiguous() or matrix.T.is_contiguous() else matrix.contiguous()


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _onednn_linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        (x, weight), grad = ctx.saved_tensors, _without_gaps(grad)
        grad_x = _onednn_linear(grad, weight.T) if ctx.needs_input_grad[0] else None
        grad_weight = _onednn_linear(grad.T, x.T) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, grad.sum(0) if ctx.needs_input_grad[2] else None


def flop_counter() -> Any:
    """Return torch's `FlopCounterMode`, extended to count `linear`. A multiplication with an addition counts as two operations."""
    from torch.utils.flop_counter import FlopCounterMode

    def linear_flops(x_shape: Any, weight_shape: Any, *_: Any, **__: Any) -> int:
        return 2 * math.prod(x_shape) * weight_shape[0]

    custom_mapping = {torch.ops.mkldnn._linear_pointwise: linear_flops} if HAS_ONEDNN else {}
    return FlopCounterMode(display=False, custom_mapping=custom_mapping)
