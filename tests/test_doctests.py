"""Runs the usage examples in the docstrings of the losses, models and metrics."""

import doctest
import importlib
import pkgutil

import pytest
import torch

import diffcap.evaluation
import diffcap.losses
import diffcap.models

MODULES = [
    module.name
    for package in (diffcap.losses, diffcap.models, diffcap.evaluation)
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
]
WITH_EXAMPLES = ["CLIP4IDC", "CLIP4IDCAdaptation", "DIRL", "PCL", "SCORER"]


def examples_of(name: str) -> list[doctest.DocTest]:
    return [test for test in doctest.DocTestFinder().find(importlib.import_module(name)) if test.examples]


@pytest.mark.parametrize("name", MODULES)
def test_examples_give_the_output_that_they_show(name: str) -> None:
    for test in examples_of(name):
        torch.manual_seed(0)
        report: list[str] = []
        doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test, out=report.append)
        assert not report, "".join(report)


def test_every_public_function_of_the_losses_and_every_captioner_has_an_example() -> None:
    found = {test.name.rpartition(".")[2] for name in MODULES for test in examples_of(name)}
    public = [
        value.__name__
        for name in MODULES
        if name.startswith("diffcap.losses.")
        for value in vars(importlib.import_module(name)).values()
        if callable(value) and getattr(value, "__module__", "") == name and not value.__name__.startswith("_")
    ]
    assert len(public) > 15 and not sorted({*public, *WITH_EXAMPLES} - found)
