"""Batch norm over the global batch, that is, over all ranks."""

import torch
from torch import Tensor, nn

from diffcap.losses.gather import sum_over_ranks, world_size


class GlobalBatchNorm2d(nn.BatchNorm2d):
    """`nn.BatchNorm2d`, in training with the statistics of the images of all ranks together.

    The result of a training then does not depend on the number of processes. torch's SyncBatchNorm does the same, but only on
    accelerators.

    Example:
        >>> GlobalBatchNorm2d(3)(torch.randn(2, 3, 4, 4)).mean((0, 2, 3)).abs().max() < 1e-6
        tensor(True)
    """

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, h, w) to (B, C, h, w); B may differ between ranks."""
        if not self.training or world_size() == 1:
            return super().forward(x)
        assert self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None
        # Without the running mean, which all ranks have, the squares lose few digits where the mean is large.
        shift = self.running_mean.clone()
        centred = x.float() - shift[:, None, None]
        count = centred.new_tensor([centred.numel() / centred.shape[1]])
        sums = sum_over_ranks(torch.cat([centred.sum((0, 2, 3)), centred.square().sum((0, 2, 3)), count]))
        total = sums[-1].detach()
        first, second = (sums[:-1] / total).chunk(2)
        variance = second - first.square()
        with torch.no_grad():
            self.num_batches_tracked += 1
            assert self.momentum is not None
            self.running_mean.lerp_(first + shift, self.momentum)
            self.running_var.lerp_(variance * total / (total - 1), self.momentum)
        scale = self.weight * (variance + self.eps).rsqrt()
        y = (centred - first[:, None, None]) * scale[:, None, None] + self.bias[:, None, None]
        return y.to(x.dtype)
