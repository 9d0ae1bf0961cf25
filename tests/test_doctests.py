"""Runs the usage examples in the docstrings of the losses, models, metrics and of the user's captioner.

These are the examples that `pytest --doctest-modules` would run. A test of its own runs them because it sets the random seed and
the folder for each example, runs those that need Java (skipped elsewhere: METEOR starts in seconds) once, and needs no second pytest
command for src.
"""

import doctest
import importlib
import pkgutil
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.commands import ROOT

import diffcap.evaluation
import diffcap.losses
import diffcap.methods
import diffcap.models

MODULES = [
    *(
        module.name
        for package in (diffcap.losses, diffcap.methods, diffcap.models, diffcap.evaluation)
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    ),
    "diffcap.pair_captioner",
]
USER_FACING = {"PairCaptioner", "load_captioner"}
# Classes of diffcap.evaluation that only hold values.
RECORDS = {"AdditiveMetric", "Measure", "WordIdScoring", "Slots", "WordAttention"}


def examples_of(name: str) -> list[doctest.DocTest]:
    return [test for test in doctest.DocTestFinder().find(importlib.import_module(name)) if test.examples]


def public(module: ModuleType) -> dict[str, Any]:
    """The functions and classes that a module defines."""
    return {
        name: value
        for name, value in vars(module).items()
        if callable(value) and getattr(value, "__module__", "") == module.__name__ and not name.startswith("_")
    }


def run_examples(test: doctest.DocTest) -> None:
    torch.manual_seed(0)
    report: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test, out=report.append)
    assert not report, "".join(report)


@pytest.mark.parametrize("name", MODULES)
def test_examples_give_the_output_that_they_show(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # examples read examples/before.png
    for test in examples_of(name):
        run_examples(test)


@pytest.mark.thorough
def test_examples_that_need_java_give_the_output_that_they_show() -> None:
    tests = [test for name in ("java", "captions") for test in examples_of(f"diffcap.evaluation.{name}")]
    for test in tests:
        for example in test.examples:
            example.options.pop(doctest.SKIP, None)
        run_examples(test)
    assert len(tests) >= 3


def test_every_loss_and_metric_has_an_example() -> None:
    found = {test.name.rpartition(".")[2] for name in MODULES for test in examples_of(name)}
    needed = set(USER_FACING)
    for module in map(importlib.import_module, MODULES):
        for name, value in public(module).items():
            is_class = isinstance(value, type)
            is_loss = module.__name__.endswith(".losses") or (".losses." in module.__name__ and name.endswith("_loss"))
            is_metric = module.__name__.startswith("diffcap.evaluation.") and is_class and name not in RECORDS
            if is_loss or is_metric:
                needed.add(name)
    assert len(needed) > 12 and not sorted(needed - found)
