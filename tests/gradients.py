"""Comparing two forms of the same computation."""

import torch
from torch import Tensor


def same_values_and_gradients(found: Tensor, expected: Tensor, inputs: list[Tensor]) -> None:
    """Compare two tensors, and their gradients with respect to inputs for a random upstream gradient."""
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    upstream = torch.randn(found.shape)
    for ours, theirs in zip(
        torch.autograd.grad(found, inputs, upstream), torch.autograd.grad(expected, inputs, upstream), strict=True
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
