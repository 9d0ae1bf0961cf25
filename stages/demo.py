"""Run every stage on an embedded dataset for several methods, then write a table and figures."""

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

from diffcap.registry import Method, get_method, methods
from diffcap.run_folder import BEST, FINETUNE, PRETRAIN, report_dir_name
from diffcap.runner import Job, in_parallel, make, parse_seeds, run_queues, write_report
from diffcap.utils.console import run
from diffcap.utils.errors import DiffcapError

# Minutes of the demo on two cores, and those that are not training. The numbers of steps do not depend on a clock, so that the
# same command gives the same scores; they are proportional to the minutes for training.
MINUTES, OTHER_MINUTES = 12.0, 4.0


class World(NamedTuple):
    """An embedded dataset in the demo.

    Attributes:
        pairs: number of pairs. jitter: variation of the images, see `make data`.
    """

    pairs: int
    jitter: float


WORLDS = {"blocks": World(24_000, 0.3), "tiles": World(10_000, 1.0)}


@dataclass(frozen=True)
class Control:
    """A baseline that is trained in addition to a method."""

    title: str  # name of the row in the table
    run: str  # name of the run's folder
    method: str | None = None  # another method to train; None: the same method
    finetune: int | None = None  # fine-tuning steps; None: as many as the method
    ablation: str = ""
    # Additional fine-tuning steps for each pre-training step of the method, so that a baseline without pre-training is trained for
    # the same time.
    steps_per_pretrain_step: float = 0.0
    adapted: bool = False  # whether the features are extracted by the CLIP that the method's pre-training has adapted


@dataclass(frozen=True)
class Plan:
    """How a method is trained."""

    # Steps in a demo of the default length, if the method has a core for the whole training time
    finetune: int = 5400
    pretrain: int = 1300
    # Fraction of a core's time, and of the steps, when all methods are trained; 0: only METHOD=<method> trains it
    share: float = 0.5
    tiles_share: float = 0.25  # the same for WORLD=tiles
    tiles_steps: float = 0.4  # factor of the numbers of steps for WORLD=tiles, whose images have more tokens
    controls: tuple[Control, ...] = ()  # the baselines when it is trained alone; by default its first ablation


PLANS = {
    "pcl": Plan(
        finetune=5760,
        share=1.0,
        tiles_share=0.5,
        controls=(Control("the same without pre-training", "scratch", steps_per_pretrain_step=0.75),),
    ),
    "scorer": Plan(tiles_share=0.5),
    "dirl": Plan(tiles_share=0.5),
    "clip4idc": Plan(
        finetune=400,
        pretrain=300,
        share=0.0,
        tiles_share=0.0,
        tiles_steps=2.0,  # its images are harder to compare than those of blocks
        controls=(
            Control("the same without adaptation", "unadapted", ablation="unadapted"),
            Control("DIRL+CCR on CLIP4IDC's features", "cross", method="dirl", finetune=700, adapted=True),
        ),
    ),
    "rsiccformer": Plan(share=0.0),
    "chg2cap": Plan(share=0.0),
    "vlm": Plan(share=0.0, tiles_share=0.0),
}


def plan_of(method: Method) -> Plan:
    """How a method is trained; a method of another package like most."""
    return PLANS.get(method.name, Plan())


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
        method: Train one method and its baselines. pcl: the same model without pre-training, trained for the same time.
            clip4idc (from pixels): the same captioner without adaptation, and DIRL+CCR on the features of the adapted CLIP.
            Other methods: their first ablation, trained for the same number of steps. all: pcl, scorer and dirl, and on tiles
            also rsiccformer and chg2cap.
        minutes: Approximate time on two cores for one seed; more minutes train longer. clip4idc on tiles takes twice as long.
        seeds: Training seeds, separated by commas; several give means and standard deviations.
        world: Embedded dataset: blocks (rendered objects) or tiles (overhead images).
        pairs: Number of pairs to render, with and without change; 24,000 of blocks and 10,000 of tiles by default.
        jitter: Variation of camera and light, or of season and light; 0.3 for blocks and 1 for tiles by default.

    Raises:
        DiffcapError: the method is unknown, there are too few minutes, or a stage failed.
    """
    if minutes < OTHER_MINUTES + 1:
        raise DiffcapError(f"{minutes:g} minutes are too few for training; give at least {OTHER_MINUTES + 1:g}.")
    chosen = (
        [get_method(method)] if method != "all" else [known for known in methods().values() if _share(known, world)]
    )
    if any(known.base_model for known in chosen):
        raise DiffcapError(
            f"METHOD={method} has no demo, because it trains a downloaded model; use make finetune eval METHOD={method} VLM=..., or "
            "make zeroshot."
        )
    start = time.perf_counter()
    default = WORLDS[world]
    pairs, jitter = default.pairs if pairs is None else pairs, default.jitter if jitter is None else jitter
    folder, place = Path(f"data/{world}-demo"), Path(f"runs/{world}-demo/{minutes:g}min-{method}")
    shared = {"dataset": world, "folder": str(folder), "logger": "none"}
    make("the dataset", "data", {**shared, "pairs": str(pairs)}, f"--jitter={jitter:g}")
    tasks = [partial(make, "features", "extract", {**shared, "backbone": world})]
    if any(known.pretraining and known.pretraining.needs_negatives for known in chosen):
        tasks.append(partial(make, "hard negatives", "negatives", shared))
    if from_pixels := [known.name for known in chosen if known.reads_pixels]:
        tasks.append(partial(make, "pixels", "extract", {**shared, "method": from_pixels[0]}))
    in_parallel(tasks)
    length = (minutes - OTHER_MINUTES) / (MINUTES - OTHER_MINUTES)
    scales = [length * (plan_of(known).tiles_steps if world == "tiles" else 1) for known in chosen]
    if method == "all":
        rows = {known.title: own_row(known, scale, _share(known, world)) for known, scale in zip(chosen, scales)}
    else:
        rows = table(chosen[0], scales[0])
    numbers = parse_seeds(seeds)
    jobs = {name: [row.job(name, place, seed, shared) for seed in numbers] for name, row in rows.items()}
    run_queues([[jobs[name][n] for name in queue] for n in range(len(numbers)) for queue in queues(rows)])
    write_report(str(folder), world, jobs, place / report_dir_name(FINETUNE), "--pictures", "8")
    print(f"\n{(time.perf_counter() - start) / 60:.1f} minutes; figures and table.md are in {place}/report")


class DemoExperiment(NamedTuple):
    """A row of the demo's table: a method or an ablation, and its numbers of steps.

    Attributes:
        folder: name of the run's folder.
        method: name of the method.
        finetune, pretrain: steps of these stages.
        ablation: name of the method's ablation.
        adapted: folder of the row whose adapted CLIP extracts the features.
        share: fraction of a core's time.
    """

    folder: str
    method: str
    finetune: int
    pretrain: int = 0
    ablation: str = ""
    adapted: str | None = None
    share: float = 1.0

    def job(self, name: str, folder: Path, seed: int, shared: dict[str, str]) -> Job:
        """The training of the row with a seed."""
        variables = {**shared, "method": self.method, "seed": str(seed), "run": str(folder / f"{self.folder}-{seed}")}
        if self.ablation:
            variables["ablation"] = self.ablation
        if self.adapted:
            weights = folder / f"{self.adapted}-{seed}" / PRETRAIN / BEST
            features = f"clip4idc-{folder.name}-{seed}"
            variables |= {"backbone": "clip4idc", "features": features, "weights": str(weights)}
        return Job(f"{name}, seed {seed}", variables, self.finetune, self.pretrain)


def _share(method: Method, world: str) -> float:
    """Fraction of a core for a method when all methods are trained."""
    plan = plan_of(method)
    return plan.tiles_share if world == "tiles" else plan.share


def own_row(method: Method, scale: float, share: float | None = None) -> DemoExperiment:
    """The row of a method itself.

    Args:
        method: the method.
        scale: factor of the numbers of steps in `PLANS`.
        share: fraction of a core; by default the fraction when all methods are trained.
    """
    demo = plan_of(method)
    share = demo.share if share is None else share
    pretrain = round(demo.pretrain * scale * share) if method.pretraining else 0
    return DemoExperiment(method.name, method.name, round(demo.finetune * scale * share), pretrain, share=share)


def table(method: Method, scale: float) -> dict[str, DemoExperiment]:
    """The rows of a method that is trained alone: its own, then those that it is compared with."""
    own = own_row(method, scale, share=1.0)
    rows = {method.title: own}
    for control in plan_of(method).controls:
        rows[control.title] = _control(control, own, scale)
    if not plan_of(method).controls:
        for name, ablation in [(name, row) for name, row in method.ablations.items() if not row.extra][:1]:
            pretrain = own.pretrain if ablation.pretrains else 0
            rows[ablation.title] = own._replace(folder=name, pretrain=pretrain, ablation=name)
    return rows


def _control(control: Control, own: DemoExperiment, scale: float) -> DemoExperiment:
    finetune = own.finetune if control.finetune is None else round(control.finetune * scale)
    finetune += round(own.pretrain * control.steps_per_pretrain_step)
    adapted = own.folder if control.adapted else None
    return DemoExperiment(
        control.run, control.method or own.method, finetune, ablation=control.ablation, adapted=adapted
    )


def queues(rows: dict[str, DemoExperiment]) -> list[list[str]]:
    """Distribute the rows over the cores: each queue lists the names of rows that one core trains in this order.

    The shares of a queue add up to at most 1. A row that reads the features of another row comes after it in the same queue.
    """
    result: list[list[str]] = []
    for name, row in rows.items():
        waits_for = [
            queue for queue in result if row.adapted and row.adapted in [rows[other].folder for other in queue]
        ]
        has_room = [queue for queue in result[-1:] if sum(rows[other].share for other in queue) + row.share <= 1]
        if queue := (waits_for or has_room):
            queue[0].append(name)
        else:
            result.append([name])
    return result


if __name__ == "__main__":
    run(demo)
