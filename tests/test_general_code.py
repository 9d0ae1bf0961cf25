"""General code names no method and no dataset: not in an identifier, an import or a string. Docstrings and comments may."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import diffcap
from diffcap.datasets.registry import datasets
from diffcap.registry import methods

SOURCE = Path(diffcap.__file__).parent
CONTRIBUTING = Path(__file__).parents[1] / "CONTRIBUTING.md"
# What still names a method: the default of METHOD and examples; names of vocabulary layouts, which users type and checkpoints contain;
# VLM= and the extra "vlm" of the package; modules of other packages with the word "scorer".
NAMED = {
    "pcl": {"experiment.py", "text/vocabulary.py"},
    "scorer": {"evaluation/java.py", "evaluation/ngrams.py"},
    "chg2cap": {"text/vocabulary.py", "datasets/registry.py"},
    "vlm": {"experiment.py", "text/hub.py"},
}


@cache
def words(path: Path) -> str:
    """Identifiers, imported modules and string constants of a module, not its docstrings; `PclLayout` as pcl_layout."""
    text = "\n".join(set(_words(ast.parse(path.read_text(encoding="utf-8")))))
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", text).lower()


def _words(tree: ast.AST) -> Iterator[str]:
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        for field in ("id", "attr", "name", "asname", "arg", "module"):
            if isinstance(value := getattr(node, field, None), str):
                yield value
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


def _naming(name: str, own_folders: set[str]) -> set[str]:
    """The files outside of some folders that have a name, also as a part of an identifier (`pcl_layout`, `PclLayout`)."""
    pattern = re.compile(rf"(?<![a-z0-9]){name}(?![a-z0-9])")
    files = [path.relative_to(SOURCE) for path in SOURCE.rglob("*.py")]
    general = [file for file in files if file.parts[0] not in own_folders]
    return {str(file) for file in general if pattern.search(words(SOURCE / file))}


@pytest.mark.parametrize("method", methods())
def test_general_code_names_no_method(method: str) -> None:
    assert _naming(method, {"methods"}) <= NAMED.get(method, set())


# The worlds `blocks` and `tiles` are not tested, because these are also words for parts of a network and of an image, and names of
# what ships with the package: captioners, backbones and taggers.
@pytest.mark.parametrize("dataset", sorted(set(datasets()) - {"blocks", "tiles"}))
def test_general_code_names_no_dataset(dataset: str) -> None:
    assert _naming(dataset, {"methods", "datasets", "worlds"}) == set()


def _imports(path: Path) -> Iterator[str]:
    """The names that a module imports when it is imported itself: not in functions, and not for type checkers only."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    later = [
        node
        for node in nodes
        if isinstance(node, ast.FunctionDef) or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
    ]
    ignored = {id(node) for parent in later for node in ast.walk(parent)}
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom) and id(node) not in ignored:
            module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            yield from (f"{module}{alias.name}" for alias in node.names)


@cache
def imported_modules() -> dict[str, set[str]]:
    """The modules of diffcap that each module imports, such as "lit.run"; with those of other packages, their __init__.py as "lit"."""
    paths = {
        path.relative_to(SOURCE).with_suffix("").as_posix().replace("/", "."): path for path in SOURCE.rglob("*.py")
    }
    modules = {name.removesuffix("__init__").rstrip("."): path for name, path in paths.items()}
    found = {}
    for module, path in modules.items():
        names = [name.removeprefix("diffcap.") for name in _imports(path) if name.startswith("diffcap.")]
        imported = {name if name in modules else name.rpartition(".")[0] for name in names} - {""}
        packages = {name.rpartition(".")[0] for name in imported}
        found[module] = imported | {name for name in packages if name and not module.startswith(name)}
    return found


def test_imports_form_no_circle() -> None:
    imported = imported_modules()
    with pytest.raises(CycleError):  # as if an imported module imported the importing one
        TopologicalSorter({**imported, "utils.errors": {"cli"}}).prepare()
    TopologicalSorter(imported).prepare()  # raises an error that names the modules of a circle


def test_a_package_imports_only_those_before_it() -> None:
    text = CONTRIBUTING.read_text(encoding="utf-8")
    (order,) = re.findall(r"^```\n(utils .*?)```", text, re.MULTILINE | re.DOTALL)
    places = {name: number for number, name in enumerate(order.split())}
    imported = {name: others for name, others in imported_modules().items() if name not in ("", "__main__")}
    assert {name.partition(".")[0] for name in imported} == places.keys()
    upwards = {
        (name, other)
        for name, others in imported.items()
        for other in others
        if places[other.partition(".")[0]] > places[name.partition(".")[0]]
    }
    assert {names for names in upwards if names[1] != "features"} == {
        ("checkpoints.importing", "features.preprocessing")
    }


def test_only_the_registry_knows_where_a_method_is() -> None:
    pattern = re.compile(r"^\s*(?:from|import) diffcap\.methods\b", re.MULTILINE)
    general = [path for path in SOURCE.rglob("*.py") if "methods" not in path.relative_to(SOURCE).parts]
    found = {str(path.relative_to(SOURCE)) for path in general if pattern.search(path.read_text(encoding="utf-8"))}
    assert not found
