"""Training curves out of Lightning's CSV files."""

from pathlib import Path

from diffcap.report.curves import read_curves, run_curves, thinned


def log(folder: Path, stage: str, version: str, text: str) -> None:
    path = folder / stage / "logs" / version / "metrics.csv"
    path.parent.mkdir(parents=True)
    path.write_text(text)


def test_a_run_that_went_on_has_one_curve(tmp_path: Path) -> None:
    log(tmp_path, "finetune", "version_0", "epoch,step,train/loss,val/CIDEr-D\n0,10,4.0,\n0,20,3.0,0.5\n0,30,9.0,\n")
    log(tmp_path, "finetune", "version_10", "epoch,step,train/loss,val/CIDEr-D\n,40,1.0,0.75\n0,50,nan,\n0,6")
    log(tmp_path, "finetune", "version_9", "epoch,step,train/loss\n0,30,2.0\n0,40,8.0\n,,5.0\n0,45,fire\n")
    log(tmp_path, "pretrain", "version_0", "epoch,step,train/MLM\n0,5,6.5\n")
    log(tmp_path, "eval", "version_0", "epoch,step,train/loss\n0,5,6.5\n")
    curves = read_curves(tmp_path)
    assert curves == {
        "pretrain": {"train/MLM": [(5, 6.5)]},
        "finetune": {"train/loss": [(10, 4), (20, 3), (30, 2), (40, 1)], "val/CIDEr-D": [(20, 0.5), (40, 0.75)]},
    }
    assert read_curves(tmp_path / "nowhere") == {}


def test_a_long_curve_is_averaged() -> None:
    curve = [(float(step), float(step)) for step in range(1000)]
    short = thinned(curve, 100)
    assert len(short) == 100 and short[0] == (4.5, 4.5) and short[-1] == (994.5, 994.5)
    assert thinned(curve[:50], 100) == curve[:50] and thinned([], 100) == []


def test_the_curves_of_runs_are_those_of_their_last_stage(tmp_path: Path) -> None:
    rows = "step,train/loss,val/CIDEr-D\n" + "".join(f"{step},1.5,{step / 100}\n" for step in (10, 20, 30))
    log(tmp_path / "a", "pretrain", "version_0", rows)
    log(tmp_path / "a", "finetune", "version_0", rows.replace("30,1.5,0.3", "40,1.5,0.6"))
    log(tmp_path / "b", "finetune", "version_0", "step,val/CIDEr-D\n10,0.5\n")  # one validation is no curve
    found = run_curves(
        [(tmp_path / "a", ("pretrain", "finetune")), (tmp_path / "b", ("finetune",)), (tmp_path / "c", ())]
    )
    assert found == [[(10.0, 0.1), (20.0, 0.2), (40.0, 0.6)]]
