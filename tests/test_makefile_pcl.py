"""What Make builds for IDC-PCL's pre-training on more datasets, and for its ablations."""

# ruff: noqa: F811  the fixture of the tests of Make itself

import re
import shlex
from pathlib import Path

import pytest
from tests.test_makefile import logged, make, project  # noqa: F401

pytestmark = pytest.mark.slow  # make


def test_extra_datasets_are_made_and_trained_on_in_two_stages(project: Path) -> None:
    words = "DATASET=birds2words", "EXTRA=cub,nabirds", "DATA=/b", "CUB_DATA=/o'c ub", "NABIRDS_DATA=/n", "LOGGER=none"
    runs = logged(project, "pretrain", "finetune", "eval", *words)
    assert [shlex.split(options)[1:6:2] for options in runs["data"]] == [
        ["birds2words", "data/birds2words", "/b"],
        ["cub", "data/cub", "/o'c ub"],
        ["nabirds", "data/nabirds", "/n"],
    ]
    backbone = "--config configs/backbone/resnet101_layer4.yaml"
    folders = [re.search(r"--data.folder (\S+)", options)[1] for options in runs["extract"]]
    assert folders == ["data/birds2words", "data/cub", "data/nabirds"] and all(
        backbone in one for one in runs["extract"]
    )
    assert [re.search(r"--folder (\S+)", options)[1] for options in runs["negatives"]] == folders[:2]
    second, first = sorted(runs["pretrain"], key=lambda options: "pretrain-cub " in options)
    (last,) = runs["finetune"]
    place = "runs/birds2words/pcl-cub-nabirds"
    assert (
        f"--data.folder data/cub --data.features resnet101_layer4 --seed_everything 1234 --data.seed 1234 --run.out {place}/pretrain-cub "
        in first
    )
    assert "--data.folder data/birds2words " in second and f"--run.out {place}/pretrain " in second
    assert "--data.labelled data/nabirds " in second and f"--model.init_from {place}/pretrain-cub/last.ckpt" in second
    assert "init_from" not in first and "labelled" not in first and f"{place}/pretrain/last.ckpt" in last
    assert re.findall(r"--data.vocabulary_with (\S+)", " ".join((first, second, last))) == [
        "'[data/birds2words]'",
        "'[data/cub]'",
        "'[data/cub]'",
    ]
    settings = [re.findall(r"--config configs/(\S+)", options)[-2:] for options in (first, second, last)]
    assert settings == [
        ["dataset/cub.yaml", "method/pcl/pretrain.cub.yaml"],
        ["method/pcl/pretrain.birds2words.yaml", "method/pcl/pretrain.nabirds.yaml"],
        ["dataset/birds2words.yaml", "method/pcl/finetune.birds2words.yaml"],
    ]
    again = logged(project, "pretrain", "finetune", "eval", *words)  # folders that were named are looked at again
    assert {stage: len(found) for stage, found in again.items()} == {"data": 3}


@pytest.mark.parametrize("extra", ["cub", "nabirds"])
def test_either_extra_dataset_alone(project: Path, extra: str) -> None:
    runs = logged(project, "pretrain", "DATASET=birds2words", f"EXTRA={extra}", "DATA=/b", "SEED=3")
    assert [shlex.split(options)[1:4:2] for options in runs["data"]] == [
        ["birds2words", "data/birds2words"],
        [extra, f"data/{extra}"],
    ]
    assert len(runs["negatives"]) == 1 + (extra == "cub") and len(runs["pretrain"]) == 1 + (extra == "cub")
    (last,) = [o for o in runs["pretrain"] if f"--run.out runs/birds2words/pcl-{extra}-seed3/pretrain " in o]
    assert ("--data.labelled data/nabirds" in last) == (extra == "nabirds")
    assert ("init_from" in last) == (extra == "cub")
    assert ("method/pcl/pretrain.nabirds.yaml" in last) == (extra == "nabirds")


def test_both_extra_datasets_beside_the_first_one_in_one_stage(project: Path) -> None:
    runs = logged(project, "pretrain", "finetune", "DATASET=birds2words", "EXTRA=mixed", "DATA=/b")
    (trained,), (tuned,) = runs["pretrain"], runs["finetune"]
    assert "--data.folder data/birds2words " in trained and "--run.out runs/birds2words/pcl-mixed/pretrain " in trained
    for option in ("singles data/cub", "labelled data/nabirds", "vocabulary_with '[data/cub]'"):
        assert f"--data.{option} " in f"{trained} "
    assert "init_from" not in trained and "configs/method/pcl/pretrain.mixed.yaml" in trained
    assert "--data.vocabulary_with '[data/cub]'" in tuned and "pcl-mixed/pretrain/last.ckpt" in tuned
    assert [re.search(r"--folder (\S+)", options)[1] for options in runs["negatives"]] == [
        "data/birds2words",
        "data/cub",
    ]


def test_each_dataset_has_options_and_features_of_its_own(project: Path) -> None:
    words = "DATASET=birds2words", "EXTRA=cub,nabirds", "FEATURES_FROM=/b f", "data_ARGS=--missing=skip"
    stopped = make(project, "pretrain", *words)
    assert "also give CUB_FEATURES_FROM=<the authors' folder for cub>" in stopped.stderr
    assert stopped.returncode != 0 and not (project / "log").exists()
    words = (
        *words,
        "CUB_FEATURES_FROM=/c",
        "NABIRDS_FEATURES_FROM=/n",
        "negatives_ARGS=--retrieve=1",
        "extract_ARGS=--x=1",
    )
    runs = logged(project, "pretrain", *words)
    taken = [shlex.split(options)[1:6:2] for options in runs["import_features"]]
    assert taken == [
        ["data/birds2words", "/b f", "authors"],
        ["data/cub", "/c", "authors"],
        ["data/nabirds", "/n", "authors"],
    ]
    for stage, option in (("data", "--missing=skip"), ("negatives", "--retrieve=1"), ("import_features", "--x=1")):
        assert [option in options for options in runs[stage]] == [True, *[False] * (len(runs[stage]) - 1)]
    assert "extract" not in runs
    assert make(project, "-n", "pretrain", *words[:4]).returncode == 0  # the features are there now

    words = "DATASET=birds2words", "EXTRA=cub", "extract_ARGS=--data.batch_size=8"
    runs = logged(project, "pretrain", *words)
    assert len(runs["extract"]) == 2 and all("--data.batch_size=8" in options for options in runs["extract"])


def test_an_unknown_extra_dataset_stops_before_anything_runs(project: Path) -> None:
    for words, output in (
        ("EXTRA=cup", "EXTRA=cup is unknown; give cub"),
        ("EXTRA=cub", "EXTRA=cub adds photos of birds; use DATASET=birds2words"),
        ("EXTRA=cub METHOD=dirl", "use METHOD=pcl"),
        ("EXTRA=mixed,cub", "mixed trains on CUB, NABirds and the dataset in one stage"),
    ):
        done = make(project, "pretrain", *words.split())
        assert done.returncode != 0 and output in done.stderr and not (project / "log").exists()


@pytest.mark.thorough
def test_the_rows_with_cub_share_its_stage(project: Path) -> None:
    words = "DATASET=birds2words", "DATA=/b", "ARGS=--rows=cub,nabirds,cub_nabirds --pretrain_steps=4"
    runs = logged(project, "ablation", *words)
    assert {stage: len(runs[stage]) for stage in ("data", "extract", "negatives", "pretrain")} == {
        "data": 3,
        "extract": 3,
        "negatives": 2,
        "pretrain": 3 + 1,
    }
    start = "init_from runs/birds2words/pcl-ablation/pretrain-cub-1234/last.ckpt"
    assert sum(start in found for found in runs["pretrain"]) == 2


@pytest.mark.thorough
def test_the_ablations_of_pcl_share_what_is_the_same(project: Path) -> None:
    runs = logged(project, "ablation", "SEEDS=1,2", "ARGS=--steps=8 --pretrain_steps=4 --validations=2", "PAIRS=60")
    rows = ["no_pretraining", "mlm", "mlm_mvcl", "pcl", "no_difference_encoder", "no_distractor_judging"]
    rows += ["random_pair_init"]
    place = "runs/blocks/pcl-ablation"
    counts = {
        "data": 1,
        "extract": 1,
        "negatives": 1,
        "pretrain": 2 * 5,
        "finetune": 14,
        "eval": 14,
        "report": 1,
    }
    assert {stage: len(found) for stage, found in runs.items()} == counts
    for seed in (1, 2):
        tuned = {
            row: next(found for found in runs["finetune"] if f"--run.out {place}/{row}-{seed}/finetune " in found)
            for row in rows
        }
        begun = {row: re.findall(r"init_from (\S+)", options) for row, options in tuned.items()}
        own = {row: [f"{place}/{row}-{seed}/pretrain/last.ckpt"] for row in rows}
        assert begun == {**own, "no_pretraining": [], "no_distractor_judging": own["pcl"]}
        assert "ablation/no_distractor_judging.finetune.yaml" in tuned["no_distractor_judging"]
        trained = {re.search(r"--run.out (\S+)", found)[1]: found for found in runs["pretrain"]}
        for row, file in (("mlm", "mlm.pretrain"), ("no_difference_encoder", "no_difference_encoder"), ("pcl", "pcl")):
            assert f"ablation/{file}.yaml" in trained[f"{place}/{row}-{seed}/pretrain"]
        assert "ablation/no_difference_encoder.yaml" in tuned["no_difference_encoder"]
    assert all("--trainer.max_steps=4 --trainer.val_check_interval=2" in found for found in runs["pretrain"])
    assert all("--trainer.max_steps=8 --trainer.val_check_interval=4" in found for found in runs["finetune"])
    remarks = [
        f"Skipped: all, +{birds}, because blocks has no photos of birds."
        for birds in ("CUB", "NABirds", "CUB +NABirds")
    ]
    assert shlex.split(runs["report"][0])[-2:] == ["--remark", " ".join(remarks)]
    alone = logged(project, "ablation", "ARGS=--rows=no_distractor_judging", "FOLDER=data/other")
    assert "no_distractor_judging-1234/pretrain/last.ckpt" in alone["finetune"][0] and len(alone["pretrain"]) == 1


def test_a_row_that_removes_nothing_is_skipped_with_a_remark(project: Path) -> None:
    words = "DATASET=spot_the_diff", "ARGS=--rows=pcl,no_distractor_judging"
    runs = logged(project, "ablation", *words)
    assert len(runs["finetune"]) == 1 and "no_distractor_judging" not in str(runs)
    remark = "Skipped: all, without distractor judging, because the method has no such component on spot_the_diff."
    assert shlex.split(runs["report"][0])[-2:] == ["--remark", remark]
    stopped = make(project, "ablation", "DATASET=spot_the_diff", "ARGS=--rows=no_distractor_judging")
    assert f"--rows no_distractor_judging: no row is left. {remark}" in stopped.stderr
