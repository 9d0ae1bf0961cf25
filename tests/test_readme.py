"""What the README and the pages of docs/ show exists, and what they tell the reader to write works."""

import re
import shlex
import sys
from pathlib import Path

import pytest
from PIL import Image
from tests.commands import ROOT, run
from tests.toy import write_toy

from diffcap.evaluation.coco import read_other_predictions
from diffcap.experiment import VARIABLES, Experiment
from diffcap.records import read_dataset

DIFFCAP = [sys.executable, "-m", "diffcap"]
README = ROOT / "README.md"
PAGES = [README, *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page.name != "table.md")]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


def code_blocks(page: Path, language: str = "") -> list[str]:
    """The fenced blocks of a page in one language; "" for those that name none."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_picture_and_every_linked_file_is_there(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for picture, link in re.findall(r"(!?)\[[^\]]*\]\(([^)#]+)(?:#[^)]*)?\)", text):
        if link.startswith("http"):
            continue
        assert (page.parent / link).is_file(), link
        if picture:
            with Image.open(page.parent / link) as image:
                image.verify()


def tables_of(markdown: str) -> list[list[set[tuple[str, int, str]]]]:
    """The rows of each table: (column, its number among the columns of that name, cell) of all cells."""
    tables = []
    for block in re.findall(r"(?:^\|.*\n?)+", markdown, re.MULTILINE):
        header, _, *rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in block.splitlines()]
        columns = [(name, header[:index].count(name)) for index, name in enumerate(header)]
        tables.append([{(*column, cell) for column, cell in zip(columns, row, strict=True)} for row in rows])
    return tables


def test_tables_of_scores_are_those_of_the_files_that_commands_wrote() -> None:
    """A page may leave out rows and columns of a table."""
    shown = set()
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        blocks = re.findall(r"<!-- table: (\S+) -->\n(.*?)\n<!-- end -->", text, re.DOTALL)
        assert len(blocks) == text.count("<!-- table:"), page
        for path, block in blocks:
            file = (ROOT / path).read_text(encoding="utf-8")
            for table in tables_of(block):
                in_one = [all(any(row <= other for other in rows) for row in table) for rows in tables_of(file)]
                assert table and any(in_one), (page, path)
            assert tables_of(block) or block in file, (page, path)
            shown.add(path)
    assert {"docs/demo/table.md", "docs/tiles/table.md", "docs/own_pairs/right.txt"} <= shown


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_make_target_and_variable_that_a_page_names_exists(page: Path) -> None:
    if "All commands are those of commit" in page.read_text(encoding="utf-8"):
        return
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):.*##", makefile, re.MULTILINE))
    variables = {f.name.upper() for f in VARIABLES} | {"ARGS", "SEEDS", "MINUTES", "WORLD"}
    for block in code_blocks(page):
        for line in re.findall(r"^make (.*)$", block, re.MULTILINE):
            for word in shlex.split(line, comments=True):
                name, equals, _ = word.partition("=")
                if equals:
                    assert name in variables or re.fullmatch(r"[a-z]+_ARGS", name), line
                else:
                    assert name in targets, line


def test_the_page_about_training_names_every_variable() -> None:
    page = (ROOT / "docs/train.md").read_text(encoding="utf-8")
    named = {name.lower() for name in re.findall(r"`(\w+)`", page)}
    assert {f.name for f in VARIABLES} <= named


@pytest.mark.slow
def test_the_example_of_a_file_for_config_works(tmp_path: Path) -> None:
    (example,) = code_blocks(ROOT / "docs/train.md", "yaml")
    (tmp_path / "run.yaml").write_text(example)
    experiment = Experiment(config=str(tmp_path / "run.yaml"))
    assert (experiment.dataset, experiment.method, experiment.seed) == ("clevr_change", "scorer", "7")
    assert set(experiment.sections) == {"finetune", "eval"}
    words = [*DIFFCAP, "finetune", "--config", "run.yaml", "--print_config"]
    done = run(words, tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^  lr: 0.0001$", done.stdout, re.MULTILINE) and "mtm: per_head" in done.stdout


@pytest.mark.slow
def test_the_example_of_ones_own_pairs_works(tmp_path: Path) -> None:
    page = (ROOT / "docs/own_dataset.md").read_text(encoding="utf-8")
    lines = re.findall(r'^\{"before".*\}$', page, re.MULTILINE)
    assert len(lines) >= 3
    folder = tmp_path / "desk"
    for name in re.findall(r'"((?:before|after)/[^"]+)"', "\n".join(lines)):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(folder / name)
    (folder / "pairs.jsonl").write_text("\n".join(lines) + "\n")
    done = run([*DIFFCAP, "data", "--dataset", "desk", "--data", str(folder), "--folder", "out"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "manifest.jsonl").read_text().count("\n") == len(lines)


def test_the_example_of_another_systems_captions_writes_a_file_that_can_be_scored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (code,) = code_blocks(ROOT / "docs/evaluate.md", "python")
    folder = write_toy(tmp_path / "data/clevr_change", scenes=12)
    monkeypatch.chdir(tmp_path)
    exec(code, {"ask": lambda before, after: f"{before.name} became {after.name}"})
    ids = [pair.id for pair in read_dataset(folder).pairs if pair.split == "test"]
    assert list(read_other_predictions("captions.jsonl", ids, ids, "the test split")) == ids


@pytest.mark.slow
def test_the_examples_of_captioning_give_the_output_that_the_readme_shows(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    text = README.read_text(encoding="utf-8")
    (command, shown), *_ = re.findall(
        r"^```\n\.venv/bin/diffcap (caption [^`]*?)```\n\n```\n(.*?)```$", text, re.S | re.M
    )
    done = run([*DIFFCAP, *shlex.split(command)], ROOT)
    assert done.stdout == shown
    ((code, shown),) = re.findall(r"^```python\n(.*?)```\n\n```\n(.*?)```$", text, re.S | re.M)
    exec(code, {})
    assert capsys.readouterr().out == shown
