"""The notebooks of examples/ run from start to end and give the captions that they show."""

import json
import os
import sys
from pathlib import Path

import pytest
from tests.commands import ROOT

nbformat = pytest.importorskip("nbformat", reason="needs diffcap[docs]")
nbclient = pytest.importorskip("nbclient", reason="needs diffcap[docs]")


def executed(name: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What each cell of a notebook printed, or its last value."""
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
