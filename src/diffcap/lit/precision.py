"""Set the precision of a training: TF32 products on GPUs, and an error for bfloat16 on processors without instructions for it."""

from pathlib import Path
from typing import Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.accelerators import CPUAccelerator, CUDAAccelerator

from diffcap.utils.errors import DiffcapError

MatmulPrecision = Literal["highest", "high", "medium"]
CPUINFO_FILE = Path("/proc/cpuinfo")


def set_precision(trainer: pl.Trainer, matmul_precision: MatmulPrecision | None, force_bf16: bool) -> None:
    """Set the precision of float32 matrix products, and check the trainer's precision.

    If `matmul_precision` is None, it is high (TF32) on CUDA and highest (float32, as in the papers' released code) elsewhere.
    `force_bf16` allows bfloat16 on a CPU without instructions for it.
    """
    if not force_bf16:
        refuse_slow_bf16(trainer, "remove the option, or add --run.force_bf16=true")
    default: MatmulPrecision = "high" if isinstance(trainer.accelerator, CUDAAccelerator) else "highest"
    torch.set_float32_matmul_precision(matmul_precision or default)


def refuse_slow_bf16(trainer: pl.Trainer, remedy: str = "remove the option") -> None:
    """Raise an error for bfloat16 on a CPU without instructions for it; the error message ends with `remedy`."""
    is_bf16_on_cpu = "bf16" in str(trainer.precision) and isinstance(trainer.accelerator, CPUAccelerator)
    if is_bf16_on_cpu and not cpu_has_bfloat16():
        raise DiffcapError(
            f"trainer.precision is {trainer.precision}, but this processor has no instructions for bfloat16, so this would be many "
            f"times slower than in float32; {remedy}."
        )


def cpu_has_bfloat16() -> bool:
    """Return True if the processor has instructions for bfloat16 (AVX512-BF16, AMX or ARM BF16), or if this is unknown."""
    if not CPUINFO_FILE.is_file():  # not Linux
        return True
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(CPUINFO_FILE.read_text().split())
