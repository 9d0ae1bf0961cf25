"""How many experiments run at the same time."""

import os

import pytest
import torch

from diffcap.runner import cores


def test_experiments_that_would_share_a_gpu_run_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cores() == 2
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert cores() == 1
