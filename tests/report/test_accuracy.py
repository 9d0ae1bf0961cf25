"""The table of `make accuracy`: means over seeds, what each row gains seed by seed, an ensemble beside them."""

import json
import statistics
from pathlib import Path

import pytest
from tests.report.test_comparison import METRICS, PAIRS, write_run
from tests.toy import captions, write_toy

from diffcap.evaluation.captions import score_captions
from diffcap.records import write_json
from diffcap.report.accuracy import accuracy_table, gain_table, gains_over_first
from diffcap.utils.errors import DiffcapError


def predictions(right: int) -> dict[str, str]:
    """The first `right` pairs are told as a reference does, the others as another pair's."""
    return {
        pair.id: pair.captions[0] if number < right else captions(30, False)[0] for number, pair in enumerate(PAIRS)
    }


def test_the_table_holds_every_row_with_its_gain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, counts = write_toy(tmp_path / "toy", scenes=12), {"greedy": [8, 12], "reinforced": [10, 20], "both": [22]}
    homes = [tmp_path / "1", tmp_path / "2"]
    for number, home in enumerate(homes):
        write_json(home / "finetune/finished.json", {"stage": "finetune", "train_seconds": 100 + number, "steps": 9})
        write_json(home / "reinforce/finished.json", {"stage": "reinforce", "train_seconds": 7, "steps": 3})
    rows = {"greedy": [home / "eval" for home in homes], "reinforced": [home / "reinforce-eval" for home in homes]}
    rows["both"] = [tmp_path / "ensemble"]
    scores: dict[str, list[float]] = {}
    for name, paths in rows.items():
        for path, right in zip(paths, counts[name]):
            write_run(tmp_path / "made", predictions(right))
            path.parent.mkdir(exist_ok=True)
            (tmp_path / "made/eval").rename(path)
            references = {pair.id: pair.captions for pair in PAIRS}
            scores.setdefault(name, []).append(
                score_captions(predictions(right), references, "raw", METRICS)["CIDEr-D"]
            )
    together = json.loads((tmp_path / "ensemble/metrics.json").read_text())
    together["protocol"]["ensemble"] = 2
    together["provenance"]["checkpoints"] = [{"file": f"../{number}/finetune/best.ckpt"} for number in (1, 2)]
    write_json(tmp_path / "ensemble/metrics.json", together)
    accuracy_table(folder, rows, tmp_path / "report")
    table = json.loads((tmp_path / "report/table.json").read_text())
    for name, values in scores.items():
        assert table["rows"][name]["total"]["CIDEr-D"] == pytest.approx(statistics.fmean(values))
    assert table["rows"]["greedy"]["std"]["total"]["CIDEr-D"] == pytest.approx(statistics.stdev(scores["greedy"]))
    seconds = [table["rows"][name]["seconds"] for name in rows]
    assert seconds == [100.5, 107.5, 201]
    gain = [after - before for after, before in zip(scores["reinforced"], scores["greedy"])]
    found = table["gains"]["reinforced"]["CIDEr-D"]
    assert found["of"] == pytest.approx(gain) and found["std"] == pytest.approx(statistics.stdev(gain))
    alone = table["gains"]["both"]["CIDEr-D"]
    assert (
        alone["mean"] == pytest.approx(scores["both"][0] - statistics.fmean(scores["greedy"])) and alone["std"] is None
    )
    text = (tmp_path / "report/table.md").read_text()
    assert "| gained over greedy | BLEU-1 | BLEU-4 | ROUGE-L | CIDEr-D |" in text
    assert (
        f"{100 * found['mean']:+.2f} ± {100 * found['std']:.2f} |" in text and "standard deviation of 2 seeds" in text
    )
    assert table["protocol"]["decoding"]["both"]["ensemble"] == 2 and table["protocol"]["seeds"] == 2
    assert "gained over the first row" in capsys.readouterr().out
    with pytest.raises(DiffcapError, match=r"lacks 16 of the runs' pairs \(first '4\.png'\)"):
        accuracy_table(write_toy(tmp_path / "small", scenes=4), rows, tmp_path / "report")


def test_one_seed_has_a_gain_without_a_spread() -> None:
    rows = {"greedy": [{"total": {"CIDEr-D": 1.0}}], "more": [{"total": {"CIDEr-D": 1.25}}]}
    assert gain_table({"more": {"CIDEr-D": {"mean": -1e-9, "std": None}}}).lines()[1] == ["more", "+0.00"]
    assert gains_over_first(rows) == {"more": {"CIDEr-D": {"mean": 0.25, "std": None, "of": [0.25]}}}


def test_scores_of_different_tokenizers_are_not_compared(tmp_path: Path) -> None:
    folder = write_toy(tmp_path / "toy", scenes=12)
    rows = {name: [write_run(tmp_path / name, predictions(8)) / "eval"] for name in ("raw", "ptb")}
    metrics = json.loads((rows["ptb"][0] / "metrics.json").read_text())
    metrics["protocol"]["tokenizer"] = "ptb"
    write_json(rows["ptb"][0] / "metrics.json", metrics)
    with pytest.raises(DiffcapError, match=r"raw/eval was scored with the tokenizer raw, .*ptb/eval with ptb"):
        accuracy_table(folder, rows, tmp_path / "report")
