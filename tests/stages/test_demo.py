"""The experiments of `make demo`: their steps are fixed, so that its scores stay the same."""

import runpy
from pathlib import Path

import pytest
from tests.commands import ROOT

from diffcap.registry import Method, get_method, methods
from diffcap.utils.errors import DiffcapError

DEMO = runpy.run_path(str(ROOT / "stages/demo.py"))
PLANS = DEMO["PLANS"]


def rows(name: str, minutes: float = 12.0) -> dict[str, tuple[object, ...]]:
    """Folder, method, fine-tuning and pre-training steps, ablation and adapted row of each row."""
    scale = (minutes - 4) / 8
    every = [known for known in methods().values() if PLANS[known.name].share]
    found = (
        {known.title: DEMO["own_row"](known, scale, PLANS[known.name].share) for known in every}
        if name == "all"
        else None
    )
    return {title: row[:6] for title, row in (found or DEMO["table"](get_method(name), scale)).items()}


@pytest.mark.parametrize(
    ("method", "minutes", "expected"),
    [
        ("all", 12, {
            "IDC-PCL": ("pcl", "pcl", 5760, 1300, "", None),
            "SCORER+CBR": ("scorer", "scorer", 2700, 0, "", None),
            "DIRL+CCR": ("dirl", "dirl", 2700, 0, "", None),
        }),
        ("pcl", 12, {
            "IDC-PCL": ("pcl", "pcl", 5760, 1300, "", None),
            "the same without pre-training": ("scratch", "pcl", 6735, 0, "", None),
        }),
        ("scorer", 12, {
            "SCORER+CBR": ("scorer", "scorer", 5400, 0, "", None),
            "Subtraction": ("subtraction", "scorer", 5400, 0, "subtraction", None),
        }),
        ("clip4idc", 28, {
            "CLIP4IDC": ("clip4idc", "clip4idc", 1200, 900, "", None),
            "the same without adaptation": ("unadapted", "clip4idc", 1200, 0, "unadapted", None),
            "DIRL+CCR on CLIP4IDC's features": ("cross", "dirl", 2100, 0, "", "clip4idc"),
        }),
    ],
)  # fmt: skip
def test_the_rows_of_diffcaps_own_methods(method: str, minutes: float, expected: dict) -> None:
    found = rows(method, minutes)
    assert found == expected and list(found) == list(expected)


def test_the_rows_of_tiles() -> None:
    every = [known for known in methods().values() if PLANS[known.name].tiles_share]
    rows = {
        known.title: DEMO["own_row"](known, PLANS[known.name].tiles_steps, PLANS[known.name].tiles_share)
        for known in every
    }
    assert {row.method for row in rows.values()} == {"pcl", "scorer", "dirl", "rsiccformer", "chg2cap"}
    assert sum(row.share for row in rows.values()) == 2  # cores
    assert [len(queue) for queue in DEMO["queues"](rows)] == [2, 3]
    clip4idc = get_method("clip4idc")
    rows = DEMO["table"](clip4idc, PLANS[clip4idc.name].tiles_steps)
    assert [(row.finetune, row.pretrain) for row in rows.values()] == [(800, 600), (800, 0), (1400, 0)]


def test_a_core_has_room_for_shares_of_one_and_a_row_waits_for_its_features() -> None:
    every = [
        *(known for known in methods().values() if PLANS[known.name].share),
        Method("new", "New", "", "x:X", "blocks"),
    ]
    shares = {known.title: DEMO["own_row"](known, 1.0, PLANS[known.name].share) for known in every}
    assert DEMO["queues"](shares) == [["IDC-PCL"], ["SCORER+CBR", "DIRL+CCR"], ["New"]]
    assert DEMO["queues"](DEMO["table"](get_method("clip4idc"), 1.0)) == [
        ["CLIP4IDC", "DIRL+CCR on CLIP4IDC's features"],
        ["the same without adaptation"],
    ]


def test_a_row_is_trained_on_the_features_of_an_adapted_clip(tmp_path: Path) -> None:
    row = DEMO["table"](get_method("clip4idc"), 1.0)["DIRL+CCR on CLIP4IDC's features"]
    job = row.job("cross", tmp_path / "12min", 7, {"dataset": "blocks"})
    assert job.variables["weights"] == str(tmp_path / "12min/clip4idc-7/pretrain/best.ckpt")
    assert (job.variables["backbone"], job.variables["features"]) == ("clip4idc", "clip4idc-12min-7")
    assert job.run == tmp_path / "12min/cross-7" and (job.finetune, job.pretrain) == (700, 0)


def test_an_unknown_method_is_refused_before_anything_runs() -> None:
    with pytest.raises(DiffcapError, match="METHOD=card is unknown; known methods: pcl"):
        DEMO["demo"]("card")
    with pytest.raises(DiffcapError, match="METHOD=vlm has no demo"):
        DEMO["demo"]("vlm")
