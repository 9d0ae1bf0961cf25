"""TF32 by accelerator, bfloat16 only where the processor has it, and neither makes an earlier run another one."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.accelerators import CPUAccelerator, CUDAAccelerator

from diffcap.lit import training
from diffcap.lit.training import set_precision
from diffcap.utils.errors import DiffcapError


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def trainer(accelerator: Any, precision: str = "32-true") -> Any:
    return SimpleNamespace(accelerator=accelerator(), precision=precision)


@pytest.mark.parametrize(
    ("accelerator", "option", "expected"),
    [
        (CPUAccelerator, None, "highest"),
        (CUDAAccelerator, None, "high"),
        (CUDAAccelerator, "highest", "highest"),
        (CPUAccelerator, "medium", "medium"),
    ],
)
def test_tf32_on_cuda_unless_the_option_says_otherwise(accelerator: Any, option: Any, expected: str) -> None:
    set_precision(trainer(accelerator), option, force_bf16=False)
    assert torch.get_float32_matmul_precision() == expected


def test_bfloat16_needs_a_processor_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "cpuinfo"
    monkeypatch.setattr(training, "CPUINFO_FILE", file)
    set_precision(trainer(CPUAccelerator, "bf16-mixed"), None, force_bf16=False)  # no Linux: it is not known
    for flags in ("flags : fpu avx2 avx512f avx512_bf16", "Features : fp asimd i8mm bf16"):
        file.write_text(f"processor : 0\n{flags}\n")
        set_precision(trainer(CPUAccelerator, "bf16-mixed"), None, force_bf16=False)
    file.write_text("processor : 0\nflags : fpu avx2 avx512f avx512bw\n")
    for name in ("bf16-mixed", "bf16-true"):
        with pytest.raises(DiffcapError, match=rf"precision is {name}.*no instructions for bfloat16.*force_bf16=true"):
            set_precision(trainer(CPUAccelerator, name), None, force_bf16=False)
        set_precision(trainer(CPUAccelerator, name), None, force_bf16=True)
        set_precision(trainer(CUDAAccelerator, name), None, force_bf16=False)
    set_precision(trainer(CPUAccelerator), None, force_bf16=False)
