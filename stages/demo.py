"""Run every stage on the embedded dataset for several methods, then write a table and figures."""

import time
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

from diffcap.run_folder import BEST, FINETUNE, PRETRAIN, report_of
from diffcap.runner import Job, in_parallel, make, parse_seeds, run_queues, write_report
from diffcap.utils.console import run
from diffcap.utils.errors import DiffcapError

# Minutes of the demo on two cores, and those that are not training. The numbers of steps do not depend on a clock, so that the
# same command gives the same scores; they are proportional to the minutes for training.
MINUTES, OTHER_MINUTES = 12.0, 4.0
PRETRAIN_STEPS, FINETUNE_STEPS = 1300, 5760  # IDC-PCL: the time of one core
SCORER_STEPS, DIRL_STEPS = 2700, 2700  # half the time of a core each; doubled if only one is trained
# CLIP4IDC, and then DIRL on its features.
ADAPT_STEPS, CLIP4IDC_STEPS, CROSS_STEPS = 300, 400, 700
# IDC-PCL without pre-training gets the time of both stages: this many fine-tuning steps take as long as one pre-training step.
STEPS_PER_PRETRAIN_STEP = 0.75

Method = Literal["all", "pcl", "scorer", "dirl", "clip4idc"]


def demo(
    method: Method = "all", minutes: float = MINUTES, seeds: str = "1234", pairs: int = 24_000, jitter: float = 0.3
) -> None:
    """Render the dataset, extract features, build negatives, train the methods on the same files, evaluate and report.

    Args:
        method: Train one method and its baselines: pcl with the same model without pre-training, trained for the same time;
            scorer and dirl with their papers' baseline, trained for the same number of steps; clip4idc (from pixels) with the
            same captioner without adaptation, and with DIRL+CCR on the features of the adapted CLIP.
        minutes: Approximate time on two cores for one seed; more minutes train longer.
        seeds: Training seeds, separated by commas; several give means and standard deviations.
        pairs: Number of pairs to render, changes and distractors.
        jitter: Variation of camera and light.

    Raises:
        DiffcapError: there are too few minutes, or a stage failed.
    """
    if minutes < OTHER_MINUTES + 1:
        raise DiffcapError(f"{minutes:g} minutes are too few for training; give at least {OTHER_MINUTES + 1:g}.")
    begin = time.perf_counter()
    folder, place = Path("data/blocks-demo"), Path(f"runs/blocks-demo/{minutes:g}min-{method}")
    shared = {"dataset": "blocks", "folder": str(folder), "logger": "none"}
    make("the dataset", "data", {**shared, "pairs": str(pairs)}, f"--jitter={jitter}")
    tasks = [partial(make, "features", "extract", {**shared, "backbone": "blocks"})]
    if method in ("all", "pcl"):
        tasks.append(partial(make, "hard negatives", "negatives", shared))
    if method == "clip4idc":
        tasks.append(partial(make, "pixels", "extract", {**shared, "method": method}))
    in_parallel(tasks)
    scale = (minutes - OTHER_MINUTES) / (MINUTES - OTHER_MINUTES)
    numbers = parse_seeds(seeds)
    rows = {
        name: [row.job(name, place, seed, shared) for seed in numbers] for name, row in _rows(method, scale).items()
    }
    run_queues(_queues(rows, method))
    write_report(str(folder), "blocks", rows, place / report_of(FINETUNE), "--pictures", "8")
    print(f"\n{(time.perf_counter() - begin) / 60:.1f} minutes; figures and table.md are in {place}/report")


class Row(NamedTuple):
    """A row of the table.

    Attributes:
        folder: name of the run's folder.
        method: name of the method.
        finetune, pretrain: steps of these stages.
        ablation: name of the method's ablation.
        adapted: row whose adapted CLIP extracts the features.
    """

    folder: str
    method: str
    finetune: int
    pretrain: int = 0
    ablation: str = ""
    adapted: str | None = None

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


def _rows(method: Method, scale: float) -> dict[str, Row]:
    pretrain, finetune = round(PRETRAIN_STEPS * scale), round(FINETUNE_STEPS * scale)
    alone = 1 if method == "all" else 2
    scorer, dirl = (round(steps * scale * alone) for steps in (SCORER_STEPS, DIRL_STEPS))
    systems = {
        "IDC-PCL": Row("pcl", "pcl", finetune, pretrain),
        "SCORER+CBR": Row("scorer", "scorer", scorer),
        "DIRL+CCR": Row("dirl", "dirl", dirl),
    }
    if method == "all":
        return systems
    if method == "clip4idc":
        adapt, clip, cross = (round(steps * scale) for steps in (ADAPT_STEPS, CLIP4IDC_STEPS, CROSS_STEPS))
        return {
            "CLIP4IDC": Row("clip4idc", "clip4idc", clip, adapt),
            "the same without adaptation": Row("unadapted", "clip4idc", clip, ablation="unadapted"),
            "DIRL+CCR on CLIP4IDC's features": Row("cross", "dirl", cross, adapted="clip4idc"),
        }
    controls = {
        "the same without pre-training": Row("scratch", "pcl", finetune + round(pretrain * STEPS_PER_PRETRAIN_STEP)),
        "Subtraction": Row("subtraction", "scorer", scorer, ablation="subtraction"),
        "Transformer": Row("transformer", "dirl", dirl, ablation="transformer"),
    }
    return {name: row for name, row in {**systems, **controls}.items() if row.method == method}


def _queues(rows: dict[str, list[Job]], method: Method) -> list[list[Job]]:
    """Queues of jobs. IDC-PCL takes as long as the two others; a row that reads the features of another one comes after it."""
    seeds = zip(*rows.values())
    if method == "all":
        return [queue for pcl, *others in seeds for queue in ([pcl], others)]
    if method == "clip4idc":
        return [queue for adapted, control, cross in seeds for queue in ([adapted, cross], [control])]
    return [[job] for jobs in seeds for job in jobs]


if __name__ == "__main__":
    run(demo)
