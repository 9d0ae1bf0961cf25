"""Copies of tensors from a device to the host. The host waits once for all copies, and may do other work before."""

import torch
from torch import Tensor


class HostCopy:
    """Copies of tensors. They are made in the background: the host can do other work until it calls `wait`.

    The tensors are on one device. From CUDA they are copied into pinned memory, which the device can write without the host.
    On the CPU nothing is copied.
    """

    def __init__(self, *tensors: Tensor) -> None:
        is_cuda = bool(tensors) and tensors[0].is_cuda
        # torch's result of a copy from CUDA with `non_blocking` is in pinned memory.
        self._copies = [tensor.detach().to("cpu", non_blocking=is_cuda) for tensor in tensors]
        self._end = torch.cuda.Event() if is_cuda else None
        if self._end is not None:
            self._end.record(torch.cuda.current_stream(tensors[0].device))

    def wait(self) -> list[Tensor]:
        """Wait until the tensors are copied, and return them on the CPU, in the order of the constructor's arguments."""
        if self._end is not None:
            self._end.synchronize()
        return self._copies
