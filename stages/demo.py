"""Run every stage on a rendered dataset for several methods, then write a table and figures."""

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

from diffcap.registry import Method, get_method, methods
from diffcap.run_folder import BEST, PRETRAIN, REPORT
from diffcap.runner import Job, in_parallel, make, parse_seeds, run_queues, write_report
from diffcap.utils.console import run
from diffcap.utils.errors import DiffcapError

# Default minutes of the demo on two cores, and how many of these minutes are not training. The numbers of steps are proportional to the
# minutes for training. They do not depend on a clock, so that the same command gives the same scores.
MINUTES, OTHER_MINUTES = 12.0, 4.0

# Rendered dataset -> default number of pairs, and default variation of the images (`--jitter` of `make data`).
WORLDS = {"blocks": (24_000, 0.3), "tiles": (10_000, 1.0)}


class Row(NamedTuple):
    """A row of the demo's table: a method or an ablation, and its numbers of steps."""

    folder: str  # name of the run's folder
    method: str
    finetune: int  # steps
    pretrain: int = 0  # steps
    ablation: str = ""
    adapted: str | None = None  # folder of the row whose adapted CLIP extracts the features
    share: float = 1.0  # fraction of the time of one core that its training takes

    def job(self, name: str, folder: Path, seed: int, shared: dict[str, str]) -> Job:
        """Return the training of the row with a seed. `folder` holds the runs of all rows, `shared` the variables of all rows."""
        variables = {**shared, "method": self.method, "seed": str(seed), "run": str(folder / f"{self.folder}-{seed}")}
        if self.ablation:
            variables["ablation"] = self.ablation
        if self.adapted:
            weights = folder / f"{self.adapted}-{seed}" / PRETRAIN / BEST
            features = f"clip4idc-{folder.name}-{seed}"
            variables |= {"backbone": "clip4idc", "features": features, "weights": str(weights)}
        return Job(f"{name}, seed {seed}", variables, self.finetune, self.pretrain)


@dataclass(frozen=True)
class Plan:
    """How the demo trains a method."""

    # Steps in a demo of the default length, if the method has a core for the whole training time
    finetune: int = 5400
    pretrain: int = 1300
    # Fraction of a core's time, and of the steps, when all methods are trained; with 0, only `make demo METHOD=<method>` trains the method
    share: float = 0.5
    tiles_share: float = 0.25  # `share` for WORLD=tiles
    tiles_steps: float = 0.4  # factor of the numbers of steps for WORLD=tiles, whose images have more tokens
    # Function (row of the method, factor of the steps) -> rows to compare with a method that is trained alone; None: its first ablation
    controls: Callable[[Row, float], dict[str, Row]] | None = None


def _pcl_controls(own: Row, scale: float) -> dict[str, Row]:
    finetune = own.finetune + round(0.75 * own.pretrain)  # takes the same time
    return {"the same without pre-training": Row("scratch", "pcl", finetune)}


def _clip4idc_controls(own: Row, scale: float) -> dict[str, Row]:
    return {
        "the same without adaptation": Row("unadapted", "clip4idc", own.finetune, ablation="unadapted"),
        "DIRL+CCR on CLIP4IDC's features": Row("cross", "dirl", round(700 * scale), adapted=own.folder),
    }


PLANS = defaultdict[str, Plan](Plan)  # a method of another package has the default plan
PLANS |= {
    "pcl": Plan(finetune=5760, share=1.0, tiles_share=0.5, controls=_pcl_controls),
    "scorer": Plan(tiles_share=0.5),
    "dirl": Plan(tiles_share=0.5),
    # More steps for tiles, whose images are harder to compare for CLIP4IDC than those of blocks.
    "clip4idc": Plan(400, 300, share=0.0, tiles_share=0.0, tiles_steps=2.0, controls=_clip4idc_controls),
    "rsiccformer": Plan(share=0.0),
    "chg2cap": Plan(share=0.0),
    "vlm": Plan(share=0.0, tiles_share=0.0),
}


def demo(
    method: str = "all",
    minutes: float = MINUTES,
    seeds: str = "1234",
    world: Literal["blocks", "tiles"] = "blocks",
    pairs: int | None = None,
    jitter: float | None = None,
) -> None:
    """Render the dataset, extract features, build negatives, train the methods on the same files, evaluate and report.

    Args:
        method: Method to train and compare. pcl is compared with the same model without pre-training, trained for the same time;
            clip4idc (from pixels) with the same captioner without adaptation, and with DIRL+CCR on the features of the adapted CLIP;
            another method with its first ablation, trained for the same number of steps. The value all trains pcl, scorer and dirl, and
            on tiles also rsiccformer and chg2cap.
        minutes: Approximate time on two cores for one seed; more minutes train longer. clip4idc on tiles takes twice as long.
        seeds: Training seeds, separated by commas; several give means and standard deviations.
        world: Rendered dataset: blocks (rendered objects) or tiles (overhead images).
        pairs: Number of pairs to render, with and without change; 24,000 of blocks and 10,000 of tiles by default.
        jitter: Variation of camera and light, or of season and light; 0.3 for blocks and 1 for tiles by default.
    """
    if minutes < OTHER_MINUTES + 1:
        raise DiffcapError(f"{minutes:g} minutes are too few for training; give at least {OTHER_MINUTES + 1:g}.")
    shares = {  # fraction of a core for each method when all methods are trained
        name: PLANS[name].tiles_share if world == "tiles" else PLANS[name].share for name in methods()
    }
    chosen = [get_method(method)] if method != "all" else [methods()[name] for name in shares if shares[name]]
    if any(known.base_model_module for known in chosen):
        raise DiffcapError(
            f"METHOD={method} has no demo, because it trains a downloaded model; use make finetune eval METHOD={method} VLM=..., or "
            "make zeroshot."
        )
    start = time.perf_counter()
    default_pairs, default_jitter = WORLDS[world]
    pairs, jitter = default_pairs if pairs is None else pairs, default_jitter if jitter is None else jitter
    folder, out_folder = Path(f"data/{world}-demo"), Path(f"runs/{world}-demo/{minutes:g}min-{method}")
    shared = {"dataset": world, "folder": str(folder), "logger": "none"}
    make("the dataset", "data", {**shared, "pairs": str(pairs)}, f"--jitter={jitter:g}")
    tasks = [partial(make, "features", "extract", {**shared, "backbone": world})]
    if any(known.pretraining and known.pretraining.needs_negatives for known in chosen):
        tasks.append(partial(make, "hard negatives", "negatives", shared))
    if pixel_methods := [known.name for known in chosen if known.reads_pixels]:
        tasks.append(partial(make, "pixels", "extract", {**shared, "method": pixel_methods[0]}))
    in_parallel(tasks)
    time_factor = (minutes - OTHER_MINUTES) / (MINUTES - OTHER_MINUTES)
    scales = [time_factor * (PLANS[known.name].tiles_steps if world == "tiles" else 1) for known in chosen]
    if method == "all":
        rows = {known.title: own_row(known, scale, shares[known.name]) for known, scale in zip(chosen, scales)}
    else:
        rows = table(chosen[0], scales[0])
    seed_numbers = parse_seeds(seeds)
    jobs = {name: [row.job(name, out_folder, seed, shared) for seed in seed_numbers] for name, row in rows.items()}
    run_queues([[jobs[name][index] for name in queue] for index in range(len(seed_numbers)) for queue in queues(rows)])
    write_report(str(folder), world, jobs, out_folder / REPORT, "--pictures", "8")
    print(f"\n{(time.perf_counter() - start) / 60:.1f} minutes; figures and table.md are in {out_folder}/report")


def own_row(method: Method, scale: float, share: float) -> Row:
    """Return the row of a method itself; `scale` is a factor of the steps in `PLANS`, `share` the fraction of a core."""
    plan = PLANS[method.name]
    pretrain = round(plan.pretrain * scale * share) if method.pretraining else 0
    return Row(method.name, method.name, round(plan.finetune * scale * share), pretrain, share=share)


def table(method: Method, scale: float) -> dict[str, Row]:
    """Return the rows of a method that is trained alone: its own, then those that it is compared with."""
    own = own_row(method, scale, share=1.0)
    controls = PLANS[method.name].controls
    if controls:
        return {method.title: own, **controls(own, scale)}
    rows = {method.title: own}
    for name, ablation in [(name, row) for name, row in method.ablations.items() if not row.extra][:1]:
        pretrain = own.pretrain if ablation.pretrains else 0
        rows[ablation.title] = own._replace(folder=name, pretrain=pretrain, ablation=name)
    return rows


def queues(rows: dict[str, Row]) -> list[list[str]]:
    """Distribute the rows over the cores: each queue lists the names of rows that one core trains in this order.

    The shares of a queue add up to at most 1. A row that reads the features of another row comes after it in the same queue.
    """
    result: list[list[str]] = []
    for name, row in rows.items():
        queues_with_features = [
            queue for queue in result if row.adapted and row.adapted in [rows[other].folder for other in queue]
        ]
        roomy_queues = [queue for queue in result[-1:] if sum(rows[other].share for other in queue) + row.share <= 1]
        if suitable_queues := (queues_with_features or roomy_queues):
            suitable_queues[0].append(name)
        else:
            result.append([name])
    return result


if __name__ == "__main__":
    run(demo)
