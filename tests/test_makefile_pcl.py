"""What Make builds for IDC-PCL's pre-training on more datasets, and for its ablations."""

# ruff: noqa: F811  the fixture of the tests of Make itself

import itertools
import re
import shlex
from pathlib import Path

import pytest
from tests.test_makefile import logged, make, project  # noqa: F401

pytestmark = pytest.mark.slow  # make


def prepare(project: Path, *datasets: str) -> None:
    """Manifests of datasets of EXTRA."""
    for name in datasets:
        make(project, "data", f"DATASET={name}", f"DATA=/{name}")


def options_of(line: str) -> dict[str, str]:
    """The options of a training: name -> value."""
    words = [word for word in shlex.split(line) if word != "--"]
    return {name.removeprefix("--"): value for name, value in itertools.pairwise(words) if name.startswith("--")}


def test_extra_datasets_are_trained_on_in_two_stages(project: Path) -> None:
    prepare(project, "cub", "nabirds")
    words = "DATASET=birds2words", "EXTRA=cub,nabirds", "DATA=/b", "LOGGER=none"
    runs = logged(project, "pretrain", "finetune", "eval", *words)
    assert [shlex.split(options)[1] for options in runs["data"]] == ["birds2words"]
    folders = sorted(options_of(options)["data.folder"] for options in runs["extract"])
    assert folders == ["data/birds2words", "data/cub", "data/nabirds"]
    assert all("--model.stage layer4" in options for options in runs["extract"])
    assert sorted(options_of(options)["folder"] for options in runs["negatives"]) == folders[:2]
    (first,), (second,), (last,) = (
        [options_of(line) for line in runs[stage]] for stage in ("pretrain-extra", "pretrain", "finetune")
    )
    place = "runs/birds2words/pcl-cub-nabirds"
    assert (first["data.folder"], first["run.out"]) == ("data/cub", f"{place}/pretrain-cub")
    assert (second["data.folder"], second["run.out"]) == ("data/birds2words", f"{place}/pretrain")
    assert second["data.labelled"] == "data/nabirds" and second["model.init_from"] == f"{place}/pretrain-cub/last.ckpt"
    assert "model.init_from" not in first and "data.labelled" not in first
    assert last["model.init_from"] == f"{place}/pretrain/last.ckpt"
    vocabularies = [options["data.vocabulary_with"] for options in (first, second, last)]
    assert vocabularies == ["['data/birds2words']", "['data/cub']", "['data/cub']"]
    again = logged(project, "pretrain", "finetune", "eval", *words)  # a folder that was named is looked at again
    assert {stage: len(found) for stage, found in again.items()} == {"data": 1}


def test_an_extra_dataset_that_is_not_there_is_named_with_its_command(project: Path) -> None:
    for words, command in (
        (["EXTRA=cub"], "make it with `make data DATASET=cub`"),
        (["EXTRA=nabirds", "METHOD=pcl"], "make it with `make data DATASET=nabirds`"),
    ):
        done = make(project, "finetune", "DATASET=birds2words", "DATA=/b", *words)
        assert done.returncode and command in done.stderr and not (project / "log").exists()
    prepare(project, "cub")
    (project / "log").unlink()
    words = "DATASET=birds2words", "DATA=/b", "EXTRA=cub", "FEATURES_FROM=/b f"
    done = make(project, "pretrain", *words)
    assert "first run `make extract DATASET=cub FEATURES_FROM=<the authors' folder for cub>`" in done.stderr
    assert not (project / "log").exists()
    make(project, "extract", "DATASET=cub", "FEATURES_FROM=/c")
    runs = logged(project, "pretrain", *words)
    assert [options_of(line)["source"] for line in runs["import_features"]] == ["/b f"]
    assert options_of(runs["pretrain-extra"][0])["data.features"] == "authors"


def test_an_unknown_extra_dataset_stops_before_anything_runs(project: Path) -> None:
    for words, output in (
        ("EXTRA=cup", "EXTRA=cup is unknown; give cub, nabirds, cub,nabirds, or mixed"),
        ("EXTRA=cub METHOD=dirl", "use METHOD=pcl"),
        ("EXTRA=mixed,cub", "mixed trains on all datasets in one stage"),
    ):
        done = make(project, "pretrain", "DATASET=desk", "DATA=/x", *words.split())
        assert done.returncode != 0 and output in done.stderr and not (project / "log").exists()


@pytest.mark.thorough
def test_the_ablations_of_pcl_share_what_is_the_same(project: Path) -> None:
    prepare(project, "cub", "nabirds")
    desk = "DATASET=desk", "DATA=/x"
    steps = "ARGS=--steps=8 --pretrain_steps=4"
    runs = logged(project, "ablation", "SEEDS=1,2", steps, *desk)
    rows = ["no_pretraining", "mlm", "mlm_mvcl", "pcl", "no_difference_encoder", "no_distractor_judging"]
    rows += ["random_pair_init", "cub", "nabirds", "cub_nabirds"]
    places = {row: f"runs/desk/pcl-{row.replace('_', '-') if 'nabirds' in row else row}-seed2" for row in rows}
    counts = {
        "data": 1,
        "extract": 3,
        "negatives": 2,
        "pretrain": 2 * 9,  # two rows share a folder; the second finds it finished
        "pretrain-extra": 4,  # likewise
        "finetune": 20,
        "eval": 20,
        "report": 1,
    }
    assert {stage: len(found) for stage, found in runs.items()} == counts
    links = {
        (row, path.name): path.resolve()
        for row in rows
        for path in (project / places[row]).iterdir()
        if path.is_symlink()
    }
    assert links == {
        ("no_distractor_judging", "pretrain"): project / places["pcl"] / "pretrain",
        ("cub_nabirds", "pretrain-cub"): project / places["cub"] / "pretrain-cub",
    }
    tuned = {
        row: next(found for found in runs["finetune"] if f"--run.out {places[row]}/finetune " in found) for row in rows
    }
    begun = {row: re.findall(r"init_from (\S+)", options) for row, options in tuned.items()}
    assert begun == {**{row: [f"{places[row]}/pretrain/last.ckpt"] for row in rows}, "no_pretraining": ["None"]}
    trained = {options_of(found)["run.out"]: options_of(found) for found in runs["pretrain"]}
    assert trained[f"{places['cub']}/pretrain"]["model.init_from"] == f"{places['cub']}/pretrain-cub/last.ckpt"
    assert all("--trainer.max_steps=4 --trainer.val_check_interval=1" in found for found in runs["pretrain"])


def test_a_row_that_removes_nothing_is_skipped_with_a_remark(project: Path) -> None:
    runs = logged(project, "ablation", "DATASET=spot_the_diff", "ABLATION=pcl,no_distractor_judging,cub")
    assert len(runs["finetune"]) == 1 and "no_distractor_judging" not in str(runs)
    remark = "Skipped: all, without distractor judging, because the method has no such component on spot_the_diff."
    skipped = f"{remark} Skipped: all, +CUB, because data/cub is not there."
    assert options_of(runs["report"][0])["remark"] == skipped
    stopped = make(project, "ablation", "DATASET=spot_the_diff", "ABLATION=no_distractor_judging")
    assert f"no row is left. {remark}" in stopped.stderr
