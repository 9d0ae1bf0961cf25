"""The examples that ship: the captioners on pairs that they were not trained on, and the notebooks of examples/."""

import json
import os
import sys
from pathlib import Path

import pytest
from tests.commands import ROOT

from diffcap.datasets.no_change import LEVIR_CC
from diffcap.pair_captioner import SHIPPED_CAPTIONERS, load_captioner
from diffcap.web.result import render_examples

EXPECTED = {  # words, one of which a right caption of the example has
    "other colour": {"turned", "changed", "became", "purple"},
    "something new": {"added", "appeared", "new", "introduced"},
    "something gone": {"missing", "disappeared", "removed", "gone", "vanished", "there"},
    "new houses": {"houses"},
    "new road": {"road"},
    "new water": {"pond", "lake"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SHIPPED_CAPTIONERS)
def test_the_examples_of_the_page_are_described(name: str) -> None:
    captioner = load_captioner(name, device="cpu")
    examples = [each for each in render_examples() if each.captioner == name]
    captions = {each.title: captioner(each.before, each.after).text for each in examples}
    right = {title: EXPECTED[title] & set(captions[title].split()) for title in captions if title in EXPECTED}
    assert len(right) == 3 and all(right.values()), captions
    if name == "tiles":
        assert captions["only the season"] in LEVIR_CC


def test_they_are_small() -> None:
    for folder in SHIPPED_CAPTIONERS.values():
        assert sum(path.stat().st_size for path in folder.iterdir()) < 4_000_000


def executed(name: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What each cell of a notebook printed, or its last value."""
    nbformat = pytest.importorskip("nbformat", reason="needs diffcap[docs]")
    nbclient = pytest.importorskip("nbclient", reason="needs diffcap[docs]")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    notebook = nbformat.read(ROOT / "examples" / name, 4)
    resources = {"metadata": {"path": str(ROOT / "examples")}}
    nbclient.NotebookClient(notebook, timeout=600, coalesce_streams=True, resources=resources).execute()
    return printed(notebook)


def printed(notebook: dict) -> list[str]:
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", [])]
    return ["".join(output.get("text") or output.get("data", {}).get("text/plain", "")) for output in outputs]


@pytest.mark.slow
def test_the_notebook_about_captioning(monkeypatch: pytest.MonkeyPatch) -> None:
    committed = json.loads((ROOT / "examples/caption.ipynb").read_text(encoding="utf-8"))
    assert executed("caption.ipynb", monkeypatch)[1] == printed(committed)[1]


@pytest.mark.thorough
def test_the_notebook_about_training(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    output = "\n".join(executed("train.ipynb", monkeypatch))
    assert "30 pairs" in output and "CIDEr-D" in output and "caption:   the" in output


def test_pictures_in_the_notebooks_are_small() -> None:
    for path in (ROOT / "examples").glob("*.ipynb"):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        for output in (output for cell in cells for output in cell.get("outputs", [])):
            for kind, data in output.get("data", {}).items():
                assert not kind.startswith("image/") or len("".join(data)) * 3 / 4 < 100_000, path
