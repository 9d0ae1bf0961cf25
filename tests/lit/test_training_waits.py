"""The host waits for no value of a GPU's tensor in a training step that logs nothing, counted on a CPU with the real commands."""

from pathlib import Path

import pytest
from tests.commands import in_process, part
from tests.golden.test_golden import RUNS, TRUNK, Run, folders, words
from tests.host_waits import Step, counted_steps

__all__ = ["folders"]  # a fixture
_FEATURES = ("--data.features=toy", "--data.max_length=16", "--data.min_count=1", "--model.pretrained_lr=null")
_SIZES = ("width=16", "heads=2", "encoder_layers=2")
_CHG2CAP = (
    (*_SIZES, "attention_width=16", "ffn=24", "backbone=null", "change_weight=0.5"),
    (*_FEATURES, "--model.initial_weights=null"),
)
_VLM = ("--data.features=pixels", "--data.batch_size=2")
VLMS = ("qwen2_5_vl", "qwen3_vl", "smolvlm", "internvl", "llava_onevision", "gemma3")  # idefics3 is as smolvlm
TASKS = ("mlm", "mvcl", "fda", "single_mlm", "single_mvcl", "single_fda", "fgvc")
_MIXED = RUNS["pcl/pretrain-mixed"]
_EQUAL_SHARES = f"--data.tasks={{{{{', '.join(f'{task}: 1' for task in TASKS)}}}}}"
CASES = {
    **{name: RUNS[name]._replace(start=None) for name in RUNS if "pretrain-" not in name and "reinforce" not in name},
    "pcl/pretrain": _MIXED._replace(options=(*_MIXED.options, _EQUAL_SHARES)),
    "pcl/all_positions": RUNS["pcl/finetune"]._replace(start=None, sizes=(*TRUNK, "objective=all_positions")),
    "rsiccformer/finetune": Run("finetune", (part("rsiccformer", "finetune"),), _SIZES, _FEATURES),
    "chg2cap/finetune": Run("finetune", (part("chg2cap", "finetune"),), *_CHG2CAP),
}


def train(name: str, run: Run, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, *options: str) -> list[Step]:
    monkeypatch.setitem(RUNS, name, run)
    with counted_steps() as steps:
        assert not in_process([*words(name, folders), *options])
    return steps


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_only_a_logged_step_waits(name: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    length = 24 if name == "pcl/pretrain" else 4  # enough for all tasks
    options = f"--trainer.max_steps={length}", f"--trainer.log_every_n_steps={length}", "--trainer.val_check_interval=2"
    found = train(name, CASES[name], folders, monkeypatch, *options)
    validations = [waits for task, waits in found if task == "validation"]
    assert not any(validations) and bool(validations) != (name == "clip4idc/pretrain")  # validates by retrieval
    *steps, logged = [step for step in found if step[0] != "validation"]
    assert {task for task, _ in steps} == (set(TASKS) if name == "pcl/pretrain" else {""})
    assert [waits for _, waits in steps] == [[]] * (length - 1)
    assert any("lit/training.py" in wait for wait in logged[1])


@pytest.mark.slow
@pytest.mark.parametrize("family", VLMS)
def test_a_vision_language_model_waits_in_one_function_of_transformers_at_most(
    family: str, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    from tests.tiny_vlms import build

    size = f"base={build(family, tmp_path / 'base')}"
    run = Run("finetune", (part("vlm", "finetune"), part("vlm", "finetune", "blocks")), (size,), _VLM)
    options = "--trainer.max_steps=2", "--trainer.log_every_n_steps=2"
    first, logged = train("vlm", run, folders, monkeypatch, *options)
    assert len(first[1]) == (family == "llava_onevision")
    assert all("lift_fresh" in wait and "/transformers/models/llava_onevision/" in wait for wait in first[1])
    assert any("lit/training.py" in wait for wait in logged[1])
