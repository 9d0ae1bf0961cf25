from collections import Counter
from pathlib import Path

from diffcap.negatives import CaptionNegatives, Negative
from diffcap.negatives.file import Report


def row(number: int) -> CaptionNegatives:
    kinds = ("retrieve", "confuse") if number % 2 else ("retrieve", "replace")
    return CaptionNegatives(f"id{number}", f"caption {number}", [Negative(kind, f"{kind} {number}") for kind in kinds])


def test_examples_counts_and_settings(tmp_path: Path) -> None:
    report = Report(seed=5)
    for number in range(500):
        report.add(row(number))
    used = {
        ("retrieve", "alike"): 400,
        ("retrieve", "any other change caption"): 100,
        ("replace", "words replaced"): 250,
    }
    report.write(tmp_path / "negatives.md", {"seed": 5}, used)
    text = (tmp_path / "negatives.md").read_text()
    assert "500 captions" in text and "| seed | 5 |" in text
    assert "| retrieve | alike | 400 | 80.0% |  |" in text
    assert "| retrieve | any other change caption | 100 | 20.0% | fallback |" in text
    for kind in ("retrieve", "replace", "confuse"):
        section = text.split(f"## {kind}: 20 examples\n")[1].split("\n## ")[0]
        assert section.count("\n* id") == 20 and section.count(f"\n  * {kind} ") == 20


def test_every_caption_has_the_same_chance(tmp_path: Path) -> None:
    seen: Counter[int] = Counter()
    for seed in range(400):
        report = Report(examples=5, seed=seed)
        for number in range(20):
            report.add(row(number))
        report.write(tmp_path / "r.md", {}, {})
        section = (tmp_path / "r.md").read_text().split("## replace")[0]
        seen.update(int(line.split(":")[0][4:]) for line in section.split("\n") if line.startswith("* id"))
    assert sum(seen.values()) == 2000
    assert min(seen[number] for number in range(20)) > 60 and max(seen.values()) < 140  # 100 each, give or take
