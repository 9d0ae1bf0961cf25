"""The experiments of a grid for `diffcap benchmark`."""

from pathlib import Path

import pytest
from tests.commands import ROOT

from diffcap.cli import main

GRID = """
datasets: [blocks, {dataset: tiles, pairs: 60}]
methods: [scorer, {method: scorer, ablation: "rr,scorer"}]
seeds: [1, 2]
trainer: short
"""


def listed(tmp_path: Path, capsys: pytest.CaptureFixture[str], *words: str, grid: str = GRID) -> list[str]:
    """What --list prints."""
    (tmp_path / "grid.yaml").write_text(grid)
    main(["benchmark", str(tmp_path / "grid.yaml"), "--list", *words])
    return capsys.readouterr().out.splitlines()


def test_a_grid_has_every_combination_and_each_is_in_one_part(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = listed(tmp_path, capsys)
    assert len(set(lines)) == 2 * 3 * 2
    assert "--dataset blocks --method scorer --seed 2 --trainer short" in lines
    assert "--dataset tiles --method scorer --ablation rr --seed 1 --trainer short --pairs 60" in lines
    parts = [listed(tmp_path, capsys, f"--shard={index}/5") for index in range(5)]
    assert sorted(line for part in parts for line in part) == sorted(lines)
    options = listed(tmp_path, capsys, "--trainer=smoke", "--seeds=7")
    assert len(options) == 6 and all("--seed 7 --trainer smoke" in line for line in options)


def test_every_row_with_the_same_pretraining_is_in_one_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grid = "{datasets: [spot_the_diff, clevr_change], methods: [{method: pcl, ablation: all}], seeds: [1]}"
    rows = "--ablation=pcl,no_distractor_judging"  # the second row is only on clevr_change
    parts = [listed(tmp_path, capsys, rows, f"--shard={index}/2", grid=grid) for index in range(2)]
    assert [len(part) for part in parts] == [1, 2] and "spot_the_diff" in parts[0][0]


@pytest.mark.parametrize("path", sorted((ROOT / "configs/benchmark").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_grids_that_ship_are_valid(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["benchmark", str(path), "--list", "--seeds=1,2,3"])
    assert len(capsys.readouterr().out.splitlines()) >= 9


@pytest.mark.parametrize(
    ("old", "new", "words", "message"),
    [
        ("seeds: [1, 2]", "", [], "the grid has no seeds; give datasets, methods, seeds, each as a list"),
        ("seeds: [1, 2]", "seeds: 1", [], "the grid has no seeds"),
        ("seeds: [1, 2]", "seeds: [1, x]", [], "SEED=x is not a seed"),
        ("[scorer,", "[scorre,", [], "METHOD=scorre is unknown"),
        ("trainer:", "trainr:", [], "grid.yaml: the key 'trainr' is unknown, did you mean trainer"),
        ("pairs:", "pair:", [], "grid.yaml: datasets: the key 'pair' is unknown, did you mean pairs"),
        ("pairs: 60", "finetune: {model: {lr: 1}}", [], "datasets: finetune is a section of options; move it to"),
        ("trainer:", "finetune: {model: {lr: 1}}\ntrainer:", ["--config=x.yaml"], "so config cannot name another file"),
        ("[1, 2]", "[1, 1]", [], "have the same run folder, runs/blocks/scorer-seed1; leave out one of them"),
        ("", "", ["--shard=2/2"], "--shard=2/2 is not a part; give one of N parts as 0/N to N-1/N"),
        ("", "", ["--steps=9"], "--list prints no steps; write them in"),
    ],
)
def test_a_wrong_grid_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, words: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        listed(tmp_path, capsys, *words, grid=GRID.replace(old, new))
    assert message in str(stopped.value)
