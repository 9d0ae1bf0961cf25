"""General code names no method: not in an identifier, an import or a string. Docstrings and comments may name one as a source."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import diffcap
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


@pytest.mark.parametrize("method", methods())
def test_general_code_does_not_name(method: str) -> None:
    general = [path for path in SOURCE.rglob("*.py") if "methods" not in path.relative_to(SOURCE).parts]
    pattern = re.compile(rf"\b{method}\b", re.IGNORECASE)
    found = {str(path.relative_to(SOURCE)) for path in general if any(map(pattern.search, words(path)))}
    assert found <= NAMED[method]


def test_only_the_registry_knows_where_a_method_is() -> None:
    pattern = re.compile(r"^\s*(?:from|import) diffcap\.methods\b", re.MULTILINE)
    general = [path for path in SOURCE.rglob("*.py") if "methods" not in path.relative_to(SOURCE).parts]
    found = {str(path.relative_to(SOURCE)) for path in general if pattern.search(path.read_text(encoding="utf-8"))}
    assert found <= {"worlds/training/shipped.py"}
