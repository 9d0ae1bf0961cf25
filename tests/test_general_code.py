"""General code names no method and no dataset: not in an identifier, an import or a string. Docstrings and comments may."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import diffcap
from diffcap.datasets.registry import datasets
from diffcap.registry import methods

SOURCE = Path(diffcap.__file__).parent
# What still names a method: the default of METHOD, vocabulary layouts that have a method's name, the weights of an adapted CLIP, VLM=.
NAMED = {
    "pcl": {
        *("experiment.py", "text/vocabularies.py", "text/vocabulary.py", "data/datamodules.py"),
    },
    "scorer": {"experiment.py"},
    "dirl": set(),
    "clip4idc": {"worlds/training/shipped.py"},
    "rsiccformer": set(),
    "chg2cap": {"text/vocabularies.py", "text/vocabulary.py", "datasets/registry.py"},
    "vlm": {
        *("experiment.py", "compose.py", "stages.py", "pipeline.py", "cli.py", "text/hub.py"),
    },
}

# What still names a dataset: defaults and examples of options, a protocol with the name of its first dataset. The worlds `blocks` and
# `tiles` are not tested, because these are also words for parts of a network and of an image.
NAMED_DATASETS = {
    "birds2words": {"experiment.py", "checkpoints/importing.py"},
    "clevr_change": {"checkpoints/importing.py", "commands/interchange.py"},
    "levir_cc": {
        *(
            "commands/evaluate.py",
            "commands/score.py",
            "evaluation/protocols.py",
            "lit/finetuning.py",
            "report/gather.py",
        ),
        "report/table.py",
    },
    "cub": {"experiment.py", "data/datamodules.py"},
    "nabirds": {"experiment.py", "data/datamodules.py"},
}


@cache
def words(path: Path) -> frozenset[str]:
    """Identifiers, imported modules and string constants of a module, not its docstrings."""
    return frozenset(_words(ast.parse(path.read_text(encoding="utf-8"))))


def _words(tree: ast.AST) -> Iterator[str]:
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        for field in ("id", "attr", "name", "arg", "module"):
            if isinstance(value := getattr(node, field, None), str):
                yield value
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


def _naming(name: str, own_folders: set[str]) -> set[str]:
    """The files outside of some folders that have a name."""
    pattern = re.compile(rf"\b{name}\b", re.IGNORECASE)
    files = [path.relative_to(SOURCE) for path in SOURCE.rglob("*.py")]
    general = [file for file in files if file.parts[0] not in own_folders]
    return {str(file) for file in general if any(map(pattern.search, words(SOURCE / file)))}


@pytest.mark.parametrize("method", methods())
def test_general_code_names_no_method(method: str) -> None:
    assert _naming(method, {"methods"}) <= NAMED[method]


@pytest.mark.parametrize("dataset", sorted(set(datasets()) - {"blocks", "tiles"}))
def test_general_code_names_no_dataset(dataset: str) -> None:
    assert _naming(dataset, {"methods", "datasets", "worlds"}) <= NAMED_DATASETS.get(dataset, set())


def test_only_the_registry_knows_where_a_method_is() -> None:
    pattern = re.compile(r"^\s*(?:from|import) diffcap\.methods\b", re.MULTILINE)
    general = [path for path in SOURCE.rglob("*.py") if "methods" not in path.relative_to(SOURCE).parts]
    found = {str(path.relative_to(SOURCE)) for path in general if pattern.search(path.read_text(encoding="utf-8"))}
    assert found <= {"worlds/training/shipped.py"}
