"""Speed and memory of training, token matching and decoding on synthetic data at the papers' sizes, on the CPU."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from common import BF16_TOLERANCE, TOLERANCE, machine, write_results

from diffcap.registry import get_method
from diffcap.registry import methods as registered
from diffcap.utils.console import run

# No torch here: a child's peak memory begins with that of the process that starts it.


def methods(
    out: str,
    methods: list[str] | None = None,
    batch: int = 16,
    large_batch: int = 64,
    repeats: int = 5,
    threads: int | None = None,
    small: bool = False,
    against: str | None = None,
    kinds: list[str] | None = None,
) -> None:
    """Measure every case in a process of its own, write the numbers and a table.

    Args:
        out: the JSON file. The table has the same name with the suffix .md.
        methods: which; by default all that download nothing. "scorer" brings the token matching, dense against blocked.
        batch: pairs a training step and pairs decoded at once.
        large_batch: pairs of a second training step of SCORER, and pairs that CLIP4IDC decodes at once.
        repeats: timed runs of each case; the median counts, after one run that does not.
        threads: of torch. None: its own choice.
        small: tiny sizes, one repeat and small batches, to see that everything runs.
        against: folder of another checkout, which is measured in turn with this one; the table has the ratios, see `comparison`.
        kinds: of the cases, such as training and decoding; by default all.
    """
    from diffcap.utils.errors import DiffcapError

    trained_from_scratch = [name for name, method in registered().items() if not method.base_model_module]
    chosen = [get_method(name).name for name in methods or trained_from_scratch]
    batch, large_batch, repeats = (2, 2, 1) if small else (batch, large_batch, repeats)
    settings: dict[str, Any] = {"repeats": repeats, "threads": threads, "small": small}
    if against and not (Path(against) / "benchmarks/cases.py").is_file():
        raise DiffcapError(f"--against {against}: there is no benchmarks/cases.py; give the folder of a checkout.")
    earlier: list[dict[str, Any]] = []
    info, rows = machine(), []
    wanted = [case for case in cases(chosen, batch, large_batch, small) if kinds is None or case["kind"] in kinds]
    if not wanted:
        raise DiffcapError(f"--kinds {kinds}: {', '.join(chosen)} have no such case; omit the option for all.")
    for case in wanted:
        rounds = 2 if against else 1  # in turn, so that both see the same load of the machine
        for _ in range(rounds):
            rows.append({**case, **measured({**case, **settings})})
            if against:
                earlier.append({**case, **measured({**case, **settings}, Path(against))})
        for measurements in (rows, earlier)[: 2 if against else 1]:
            last = [measurements.pop() for _ in range(rounds)]
            measurements.append(min(last, key=lambda row: min(row["seconds"])))
            name = "" if measurements is rows else f", {against}"
            found = measurements[-1]
            print(f"{label(case)}{name}: {found['items_per_s']:.2f} items/s, {found['peak_mb']:.0f} MB")
    for plain, ours in pairs_of_forms(rows):
        if not comparison(ours, plain)["equal"]:
            raise DiffcapError(f"{label(ours)} and {plain['form']} disagree; find out why before you use the times.")
    info["threads"] = rows[0]["threads"]
    compared = ratios(rows)
    for now, before in zip(rows, earlier):
        forms = f"now / {Path(against or '').name}"
        compared.append({"case": label(now), "forms": forms, **ratio(now, before), "results": comparison(now, before)})
    for row in rows:
        row.pop("words", None)
    settings |= {"methods": chosen, "batch": batch, "large_batch": large_batch, "kinds": kinds}
    settings["against"] = Path(against).name if against else None
    write_results(out, info, table(compared, rows, small), settings, ratios=compared, cases=rows)


def cases(methods: list[str], batch: int, large_batch: int, small: bool) -> list[dict[str, Any]]:
    """What is measured, in order; the form that others are compared with comes right after them, at the same load."""
    training: list[tuple[Any, ...]] = [  # method, form, batch, streams, precision
        ("scorer", "dense", batch, 2),
        ("scorer", "blocked", batch, 2),
        ("scorer", "blocked", batch, 2, "bf16"),
        ("scorer", "dense", large_batch, 2),
        ("scorer", "blocked", large_batch, 2),
        ("scorer", "blocked", large_batch, 2, "bf16"),
        ("dirl", "MKL", batch, 1),
        ("dirl", "oneDNN", batch, 1),
        ("dirl", "oneDNN", batch, 1, "bf16"),
        ("dirl", "oneDNN", batch, 2),
        ("pcl", "MKL", batch, 1),
        ("pcl", "oneDNN", batch, 1),
        ("pcl", "oneDNN", batch, 1, "bf16"),
        ("clip4idc", "kept", batch, 1),
        ("clip4idc", "recomputed", batch, 1),
        ("clip4idc", "kept", batch, 1, "bf16"),
    ]
    two_forms = {row[0] for row in training}
    training += [(method, "", batch, 1) for method in methods if method not in two_forms]  # no second form in forms.py
    sizes = (2, 2, 2) if small else (8, 16, 32)
    rows = [_case("training", *row) for row in training]
    fda = 2 if small else 28  # pairs, with 7 captions each: the paper's batch of 200
    rows += [_case("MLM", "pcl", "", batch), _case("FDA", "pcl", "", fda), _case("retrieval", "clip4idc", "", batch)]
    rows += [_case("matching", "scorer", form, size) for size in sizes[:2] for form in ("dense", "blocked")]
    rows.append(_case("matching", "scorer", "blocked", sizes[2]))
    forms = ("uncached", "cached")
    for method in methods:
        if method != "clip4idc":
            rows += [
                _case("decoding", method, form, batch) for form in forms if method in two_forms or form == "cached"
            ]
    # Its settings evaluate 64 at once: a step reads 100 MB of CLIP's word vectors, whatever the batch.
    rows += [_case(kind, "clip4idc", form, large_batch) for kind in ("decoding", "captioning") for form in forms]
    return [row for index, row in enumerate(rows) if row["method"] in methods and row not in rows[:index]]


def _case(
    kind: str, method: str, form: str, batch: int, streams: int = 1, precision: str = "float32"
) -> dict[str, Any]:
    names = {"kind": kind, "method": method, "form": form}
    return {**names, "batch": batch, "streams": streams, "precision": precision}


def measured(case: dict[str, Any], checkout: Path | None = None) -> dict[str, Any]:
    """Run one case in a new process, with this diffcap or with cases.py and the package of another checkout."""
    from diffcap.utils.errors import DiffcapError

    folder = checkout.resolve() if checkout else Path(__file__).parents[1]
    command = [sys.executable, str(folder / "benchmarks/cases.py"), json.dumps(case)]
    environment = {**os.environ, "PYTHONPATH": str(folder / "src")}
    child = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment)
    if child.returncode:
        raise DiffcapError(f"{label(case)}: the process ended with status {child.returncode}; its error is above.")
    return json.loads(child.stdout.splitlines()[-1])


def label(case: dict[str, Any]) -> str:
    """A case's name for people."""
    words = [get_method(case["method"]).title, case["kind"], case["form"], f"batch {case['batch']}"]
    streams = "two streams" if case["streams"] == 2 else ""
    return ", ".join(filter(None, [*words, streams, "bf16" if case["precision"] == "bf16" else ""]))


def pairs_of_forms(rows: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(straightforward form, ours) of every computation that was run in both."""
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        same = (row["kind"], row["method"], row["batch"], row["streams"], row["precision"])
        found.setdefault(same, []).append(row)
    return [(forms[0], forms[1]) for forms in found.values() if len(forms) == 2]


def comparison(ours: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Compare the results of two measurements of the same case.

    The numbers are loss and gradient norm of a training, or scores and gradient norms of a matching; the words are those of all
    captions. "difference" is the largest relative difference of a number, or the share of the captions that are not the same.
    """
    if "words" in ours or "words" in other:
        captions, others = ours.get("words", []), other.get("words", [])
        different = sum(a != b for a, b in zip(captions, others)) + abs(len(captions) - len(others))
        share = different / max(1, len(captions), len(others))
        return {"equal": different == 0, "of": "words", "tolerance": 0.0, "difference": share}
    tolerance = BF16_TOLERANCE if "bf16" in (ours["precision"], other["precision"]) else TOLERANCE
    numbers, theirs = ours["check"], other["check"]
    gaps = [abs(a - b) / max(abs(a), abs(b), 1e-12) for a, b in zip(numbers, theirs, strict=True)]
    difference = max((gap if math.isfinite(gap) else 1.0 for gap in gaps), default=0.0)  # JSON has no NaN
    return {"equal": difference <= tolerance, "of": "numbers", "tolerance": tolerance, "difference": difference}


def ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Ours over the straightforward form, and bf16 over float32: `speed` of the rates, `memory` of the peaks."""
    compared = [
        (label({**ours, "form": ""}), f"{ours['form']} / {plain['form']}", ours, plain)
        for plain, ours in pairs_of_forms(rows)
    ]
    keys = ("kind", "method", "form", "batch", "streams")
    for ours in [row for row in rows if row["precision"] == "bf16"]:
        for plain in rows:
            if plain["precision"] == "float32" and all(plain[key] == ours[key] for key in keys):
                compared.append((label({**plain, "form": ""}), "bf16 / float32", ours, plain))
    return [{"case": case, "forms": forms, **ratio(ours, plain)} for case, forms, ours, plain in compared]


def ratio(ours: dict[str, Any], plain: dict[str, Any]) -> dict[str, float]:
    """Rate and memory of one measurement over those of another."""
    # 1 MB: what a tiny case needs may lie within the libraries'.
    own = [max(1.0, row["peak_mb"] - row["libraries_mb"]) for row in (ours, plain)]
    return {
        "speed": ours["items_per_s"] / plain["items_per_s"],
        "memory": ours["peak_mb"] / plain["peak_mb"],
        "memory_without_libraries": own[0] / own[1],
    }


def table(compared: list[dict[str, Any]], rows: list[dict[str, Any]], small: bool) -> list[str]:
    """The lines of results.md: ratios, then every case."""
    note = ", **tiny sizes: the numbers mean nothing**" if small else ""
    lines = [
        "# Speed and memory",
        "",
        f"`python benchmarks/methods.py`: synthetic data at the papers' sizes{note}, one process a case;"
        " float32, or where it says bf16 mixed precision (`--trainer.precision=bf16-mixed`). Decoding is from features to words, of"
        " CLIP4IDC from its image tower's tokens to words; captioning is from pixels.",
        "",
        "| ratio | | speed | peak memory | without libraries |",
        "|---|---|---|---|---|",
    ]
    for row in compared:
        times = " | ".join(f"{row[name]:.2f} x" for name in ("speed", "memory", "memory_without_libraries"))
        lines.append(f"| {row['case']} | {row['forms']} | {times} |")
    lines += [
        "",
        *results_of_checkouts(compared),
        "| case | items/s | peak, MB | libraries, MB | GFLOP of products per item |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {label(row)} | {row['items_per_s']:.2f} | {row['peak_mb']:.0f} | {row['libraries_mb']:.0f} |"
            f" {row['gflop'] / row['batch']:.2f} |"
        )
    return lines


def results_of_checkouts(compared: list[dict[str, Any]]) -> list[str]:
    """The lines of the table that say whether another checkout gave the same results; none without one."""
    rows = [row for row in compared if "results" in row]
    if not rows:
        return []
    lines = ["| results of both checkouts | | largest difference | tolerance |", "|---|---|---|---|"]
    for row in rows:
        found = row["results"]
        verdict = f"{'equal' if found['equal'] else '**not equal**'} {found['of']}"
        lines.append(f"| {row['case']} | {verdict} | {found['difference']:.1g} | {found['tolerance']:g} |")
    return [*lines, ""]


if __name__ == "__main__":
    run(methods)
