"""The whole road on the embedded dataset: every stage by its own make target, then a table and pictures."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, NamedTuple

from diffcap.chain import Make, Road, compare, cores, seeds_of, side_by_side
from diffcap.console import run
from diffcap.errors import DiffcapError
from diffcap.run_folder import BEST, FINETUNE, PRETRAIN, report_of

# Minutes of the demo on two cores that are not training. Steps are fixed numbers, not a clock, so that the same command
# gives the same scores; they grow with the minutes that are left.
MINUTES, OTHER_MINUTES = 12.0, 4.0
PRETRAIN_STEPS, FINETUNE_STEPS = 1300, 5760  # of IDC-PCL: one core's time
SCORER_STEPS, DIRL_STEPS = 2700, 2700  # half a core's time each; all of it where one is trained alone
# CLIP4IDC, and DIRL on its features, one after the other.
ADAPT_STEPS, CLIP4IDC_STEPS, CROSS_STEPS = 300, 400, 700
# IDC-PCL's control without pre-training gets the time of both stages: this many of its steps cost one pre-training step.
STEPS_PER_PRETRAIN_STEP = 0.75

Method = Literal["all", "pcl", "scorer", "dirl", "clip4idc"]


def demo(
    method: Method = "all", minutes: float = MINUTES, seeds: str = "1234", pairs: int = 24_000, jitter: float = 0.3
) -> None:
    """Render, extract, build negatives, train the methods on the same files, evaluate and report.

    Args:
        method: one alone: pcl comes with the same model without pre-training, trained as long, scorer and dirl with their
            papers' baseline, trained for as many steps, clip4idc (from pixels) with the same captioner without adaptation,
            and with DIRL+CCR on the features of the adapted CLIP.
        minutes: aimed-at time on two cores for one seed; more minutes train longer.
        seeds: of the training, separated by commas; several give means and standard deviations.
        pairs: of the dataset, change and distractor pairs together.
        jitter: of camera and light.

    Raises:
        DiffcapError: too few minutes, or a stage failed.
    """
    if minutes < OTHER_MINUTES + 1:
        raise DiffcapError(f"{minutes:g} minutes leave no time to train; give at least {OTHER_MINUTES + 1:g}.")
    begin = time.perf_counter()
    folder, place = Path("data/blocks-demo"), Path(f"runs/blocks-demo/{minutes:g}min-{method}")
    make = Make(f"FOLDER={folder}", "DATASET=blocks", "LOGGER=none")
    make("the dataset", "data", f"PAIRS={pairs}", f"ARGS=--jitter={jitter}")
    with ThreadPoolExecutor(cores()) as pool:
        needs: list[tuple[str, ...]] = [("features", "extract", "BACKBONE=blocks")]
        needs += [("hard negatives", "negatives")] if method in ("all", "pcl") else []
        needs += [("pixels", "extract", "METHOD=clip4idc")] if method == "clip4idc" else []
        for done in [pool.submit(make, *what) for what in needs]:
            done.result()
    scale = (minutes - OTHER_MINUTES) / (MINUTES - OTHER_MINUTES)
    numbers = seeds_of(seeds)
    rows = {name: [row.road(name, place, seed) for seed in numbers] for name, row in _rows(method, scale).items()}
    side_by_side(make, _lanes(rows, method))
    compare(folder, "blocks", rows, place / report_of(FINETUNE), "--pictures", "8")
    print(f"\n{(time.perf_counter() - begin) / 60:.1f} minutes; look at the pictures and table.md in {place}/report")


class Row(NamedTuple):
    """A row of the table: its folder's name, its method, its steps of fine-tuning and pre-training, more make variables.

    `adapted`: the row whose adapted CLIP makes the features, where it is one.
    """

    place: str
    method: str
    finetune: int
    pretrain: int = 0
    options: tuple[str, ...] = ()
    adapted: str | None = None

    def road(self, name: str, folder: Path, seed: int) -> Road:
        """The row's road for a seed."""
        options = self.options
        if self.adapted:
            weights = folder / f"{self.adapted}-{seed}" / PRETRAIN / BEST
            features = f"clip4idc-{folder.name}-{seed}"
            options = (*options, "BACKBONE=clip4idc", f"FEATURES={features}", f"WEIGHTS={weights}")
        place = folder / f"{self.place}-{seed}"
        return Road(f"{name}, seed {seed}", place, self.method, seed, self.finetune, self.pretrain, options)


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
            "the same without adaptation": Row("unadapted", "clip4idc", clip, options=("ABLATION=unadapted",)),
            "DIRL+CCR on CLIP4IDC's features": Row("cross", "dirl", cross, adapted="clip4idc"),
        }
    controls = {
        "the same without pre-training": Row("scratch", "pcl", finetune + round(pretrain * STEPS_PER_PRETRAIN_STEP)),
        "Subtraction": Row("subtraction", "scorer", scorer, options=("ABLATION=subtraction",)),
        "Transformer": Row("transformer", "dirl", dirl, options=("ABLATION=transformer",)),
    }
    return {name: row for name, row in {**systems, **controls}.items() if row.method == method}


def _lanes(rows: dict[str, list[Road]], method: Method) -> list[list[Road]]:
    """IDC-PCL takes as long as the two others together; what reads another's features waits for it."""
    seeds = zip(*rows.values())
    if method == "all":
        return [lane for pcl, *others in seeds for lane in ([pcl], others)]
    if method == "clip4idc":
        return [lane for adapted, control, cross in seeds for lane in ([adapted, cross], [control])]
    return [[road] for roads in seeds for road in roads]


if __name__ == "__main__":
    run(demo)
