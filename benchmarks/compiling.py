"""Whether torch.compile pays on the CPU: one training step of each method, compiled and as it is, in turn in one process.

Command: .venv/bin/python benchmarks/methods.py --compile true --out benchmarks/compiling.json
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from common import TOLERANCE, load, machine

STREAMS = {"scorer": 2}  # as in benchmarks/methods.py


def compiling(
    out: str,
    methods: list[str] | None = None,
    batch: int = 16,
    repeats: int = 5,
    threads: int | None = None,
    small: bool = False,
) -> None:
    """Time training steps (loss, backward pass, Adam) with and without torch.compile of the loss, write the numbers and a table.

    Both models have the same weights, batch and dropout. The compiled one draws its random numbers as the other does
    (`fallback_random`), so that their losses can be compared.

    Args:
        out: the JSON file. The table has the same name with the suffix .md.
        methods: which; by default pcl (fine-tuning), scorer and dirl.
        batch: pairs of a step.
        repeats: timed steps of each form, in turn, after two that do not count; the median counts.
        threads: of torch. None: its own choice.
        small: tiny sizes, to see that everything runs.
    """
    with TemporaryDirectory(prefix="diffcap-compiled-") as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache  # nothing is compiled already
        import torch

        from diffcap.records import write_json, write_text
        from diffcap.utils.provenance import provenance

        if threads:
            torch.set_num_threads(threads)
        machine_info = {**machine(), "threads": torch.get_num_threads(), "load_before": load()}
        rows = []
        for method in methods or ["pcl", "scorer", "dirl"]:
            rows.append({"method": method, "batch": batch, **measure(method, batch, repeats, small)})
            print(line(rows[-1]), flush=True)
            machine_info["load_after"] = load()
            notes = provenance(settings={"batch": batch, "repeats": repeats, "threads": threads, "small": small})
            write_json(Path(out), {"machine": machine_info, "cases": rows, "provenance": notes})
            write_text(Path(out).with_suffix(".md"), table(machine_info, rows, notes))
    print(f"{out}, {Path(out).with_suffix('.md').name}")


def measure(method: str, batch: int, repeats: int, small: bool) -> dict[str, Any]:
    """One method.

    Returns:
        For "eager" and "compiled", "seconds" and "core_seconds" (processor time) of every timed step and the "losses" of all steps;
        "compile_seconds", how much longer the first compiled step took than the first eager one; "graphs", the number of compiled
        graphs; "equal", whether the losses of the first two steps are.
    """
    import torch
    import torch._dynamo.utils
    import torch._inductor.config
    from cases import SEED, build, sizes_of, training_batch

    torch._inductor.config.fallback_random = True
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    sizes, steps = sizes_of(method, small), {}
    found: dict[str, dict[str, list[float]]] = {}
    for form in ("eager", "compiled"):
        torch.manual_seed(SEED)
        model: Any = build(method, sizes).train()
        data = training_batch(model, method, batch, STREAMS.get(method, 1), sizes)
        loss = torch.compile(model.loss) if form == "compiled" else model.loss
        steps[form] = training_step(model, loss, data)
        found[form] = {"seconds": [], "core_seconds": [], "losses": []}
    for number in range(2 + repeats):
        for form, step in steps.items():
            torch.manual_seed(SEED + number)
            start, core = time.perf_counter(), time.process_time()
            found[form]["losses"].append(step())
            found[form]["seconds"].append(time.perf_counter() - start)
            found[form]["core_seconds"].append(time.process_time() - core)
    first = {form: values["seconds"][0] for form, values in found.items()}
    for values in found.values():
        values["seconds"], values["core_seconds"] = values["seconds"][2:], values["core_seconds"][2:]
    pairs = list(zip(found["eager"]["losses"][:2], found["compiled"]["losses"][:2]))
    difference = max(abs(a - b) / abs(a) for a, b in pairs)
    return {
        **found,
        "compile_seconds": first["compiled"] - first["eager"],
        "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],
        "difference": difference,
        "equal": difference <= TOLERANCE,
    }


def training_step(model: Any, loss_of: Callable[..., Any], data: Any) -> Callable[[], float]:
    """A function that makes one step with Adam and returns the loss before it."""
    import torch

    optimizer = torch.optim.Adam((weight for weight in model.parameters() if weight.requires_grad), lr=2e-4)

    def step() -> float:
        loss = loss_of(data)["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return float(loss.item())

    return step


def line(row: dict[str, Any]) -> str:
    """A row of the table, as Markdown."""
    from diffcap.methods import get_method

    eager, compiled = row["eager"], row["compiled"]
    times = median(eager["seconds"]), median(compiled["seconds"])
    speeds = times[0] / times[1], median(eager["core_seconds"]) / median(compiled["core_seconds"])
    title, equal = get_method(row["method"]).title, "equal" if row["equal"] else "**not equal**"
    return (
        f"| {title}, batch {row['batch']} | {times[0]:.2f} | {times[1]:.2f} | {speeds[0]:.2f} x | {speeds[1]:.2f} x |"
        f" {row['compile_seconds']:.0f} | {row['graphs']} | {equal}, {row['difference']:.1g} |"
    )


def table(machine_info: dict[str, Any], rows: list[dict[str, Any]], notes: dict[str, Any]) -> str:
    """compiling.md: the times, then the machine."""
    small = ", **tiny sizes: the numbers mean nothing**" if notes["settings"]["small"] else ""
    lines = [
        "# torch.compile",
        "",
        "`python benchmarks/methods.py --compile true`: training steps with and without torch.compile of the loss, in turn in one process,"
        f" without the first two{small}. float32, synthetic data at the papers' sizes; SCORER with both streams. The losses are those of"
        f" the first two steps, with their largest relative difference; they are equal within {TOLERANCE:g}. Where other programs use the"
        " processor, the speed by processor time is the more exact one.",
        "",
        "| training | eager, s/step | compiled, s/step | speed | speed by processor time | compiling, s | graphs | losses |",
        "|---|---:|---:|---:|---:|---:|---:|---|",
        *(line(row) for row in rows),
        "",
        f"{machine_info['cpu']}, {machine_info['cores']} cores, {machine_info['threads']} threads, torch {notes['versions']['torch']}, load"
        f" {machine_info['load_before']} before and {machine_info['load_after']} after, {machine_info['date']}, commit {notes['commit']}.",
    ]
    return "\n".join(lines) + "\n"
