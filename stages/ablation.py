"""A method beside its papers' ablations on one dataset: every row by its own make targets, then the table."""

from pathlib import Path

from diffcap.chain import Make, Road, compare, seeds_of, side_by_side
from diffcap.console import run
from diffcap.errors import DiffcapError
from diffcap.run_folder import FINETUNE, report_of
from diffcap.settings import setting

# In the order and the words of the papers' tables; each is a file of configs/method/<method>/ablation.
ROWS = {
    "pcl": {
        "no_pretraining": "without pre-training",
        "mlm": "MLM",
        "mlm_mvcl": "MLM+MVCL",
        "pcl": "MLM+MVCL+FDA",
        "no_difference_encoder": "all, without difference encoder",
        "no_distractor_judging": "all, without distractor judging",
        "cub": "all, +CUB",
        "nabirds": "all, +NABirds",
        "cub_nabirds": "all, +CUB +NABirds",
    },
    "scorer": {
        "subtraction": "Subtraction",
        "rr": "RR",
        "rr_cbr": "RR+CBR",
        "scorer": "SCORER",
        "scorer_cbr": "SCORER+CBR",
    },
    "dirl": {
        "transformer": "Transformer",
        "dirl": "DIRL",
        "transformer_ccr": "Transformer+CCR",
        "dirl_ccr": "DIRL+CCR",
        "dirl_diagonal": "DIRL, diagonal term",
        "dirl_off_diagonal": "DIRL, off-diagonal term",
    },
    "clip4idc": {
        "ft1": "FT1",
        "ft2": "FT2",
        "unadapted": "CLIP4IDC without adaptation",
        "clip4idc": "CLIP4IDC",
    },
}
# Those with a pre-training stage.
PRETRAINED = {"clip4idc", *ROWS["pcl"]} - {"no_pretraining"}
# Those that are no file, but the whole method with more datasets in its pre-training; their stage on CUB is the same one.
EXTRA = {"cub": "cub", "nabirds": "nabirds", "cub_nabirds": "cub,nabirds"}
# Those that differ from another row in fine-tuning only begin with its pre-training.
BEGINS_WITH = {"no_distractor_judging": "pcl"}
# Those that take a part of fine-tuning away, by its setting; without that setting they are the whole method.
TAKES_AWAY = {"no_distractor_judging": "distractor_judging"}
SETTINGS = Path(__file__).parents[1] / "configs/method"
# What has to wait for another row travels behind it.
BEHIND = {**BEGINS_WITH, "cub_nabirds": "cub"}


def ablation(
    method: str,
    dataset: str,
    folder: str,
    features: str,
    backbone: str | None = None,
    seeds: str = "1234",
    steps: int | None = None,
    pretrain_steps: int | None = None,
    rows: str | None = None,
    more_seeds: str | None = None,
    repeated: str | None = None,
    out: str | None = None,
) -> None:
    """Train and score every row at equal steps, and write the table: BLEU-4, METEOR, ROUGE-L, CIDEr-D, by change type.

    A row that takes away what the method does not have on the dataset is left out, and the table says so.

    Args:
        method: pcl, scorer, dirl or clip4idc.
        dataset: name; its manifest and features are made if they are missing.
        folder: data/<dataset>. features: name of the feature store in it. backbone: what makes them, where it is called otherwise.
        seeds: of the training, separated by commas; several give means and standard deviations.
        steps: of every row's captioning; the method's settings by default.
        pretrain_steps: of the pre-training of rows that have one, and of the stage on CUB before it; the settings' by default.
        rows: only these, separated by commas, as the files of configs/method/<method>/ablation are called, and for pcl
            cub, nabirds and cub_nabirds, the whole method with more datasets.
        more_seeds: of the rows in `repeated` alone, on top of `seeds`: for those that a conclusion rests on.
        repeated: such rows, separated by commas; all by default.
        out: folder of the runs and of the table; runs/<dataset>/<method>-ablation by default.

    Raises:
        DiffcapError: an unknown method or row, or a stage failed.
    """
    if method not in ROWS:
        raise DiffcapError(f"METHOD={method} has no ablations here; choose one of {', '.join(ROWS)}.")
    chosen = _rows(rows, list(ROWS[method]), method)
    often = _rows(repeated, chosen, method)
    empty = [row for row in chosen if row in TAKES_AWAY and not _has(TAKES_AWAY[row], method, dataset)]
    chosen, often = ([row for row in some if row not in empty] for some in (chosen, often))
    without = "".join(f"Left out: {ROWS[method][row]}, which the method does not have on {dataset}." for row in empty)
    if not chosen:
        raise DiffcapError(f"--rows {rows} leaves no row: {without}")
    place = Path(out or f"runs/{dataset}/{method}-ablation")
    make = Make(
        f"FOLDER={folder}",
        f"DATASET={dataset}",
        f"BACKBONE={backbone or features}",
        f"FEATURES={features}",
        "LOGGER=none",
    )
    make("the features", "extract")
    if method == "pcl":  # before the rows, two of which would make them at the same time
        make("hard negatives", "negatives")
        wanted = sorted({name for row in chosen for name in EXTRA.get(row, "").split(",") if name})
        if wanted:
            make("the extra datasets", "extra", "METHOD=pcl", f"EXTRA={','.join(wanted)}")
    make = Make(
        *make.variables, "DATA=", "CUB_DATA=", "NABIRDS_DATA="
    )  # the manifest is there now; its files need not be looked at for every row
    numbers = seeds_of(seeds)
    more = [seed for seed in (seeds_of(more_seeds) if more_seeds else []) if seed not in numbers]
    runs = [(row, seed) for among, of in ((chosen, numbers), (often, more)) for seed in of for row in among]
    roads = {
        (row, seed): Road(
            f"{ROWS[method][row]}, seed {seed}",
            place / f"{row}-{seed}",
            method,
            seed,
            steps,
            pretrain_steps if row in PRETRAINED else 0,
            _options(row, place, seed),
            place / f"{BEGINS_WITH[row]}-{seed}" if (BEGINS_WITH.get(row), seed) in runs else None,
        )
        for row, seed in runs
    }
    # Seed by seed, so that an interrupted command leaves whole tables of fewer seeds.
    lanes = [
        [roads[row, seed] for row in lane]
        for seed in [*numbers, *more]
        for lane in _lanes([row for row in chosen if (row, seed) in roads])
    ]
    side_by_side(make, lanes)
    table = {ROWS[method][row]: [road for (name, _), road in roads.items() if name == row] for row in chosen}
    remark = ["--remark", without] if without else []
    compare(Path(folder), features, table, place / report_of(FINETUNE), "--pictures", "0", "--attention", "0", *remark)


def _has(part: str, method: str, dataset: str) -> bool:
    """Whether a part of the captioner is on in the fine-tuning on a dataset."""
    files = [SETTINGS / method / name for name in ("finetune.yaml", f"finetune.{dataset}.yaml")]
    return bool(setting(files, "model", "captioner", "init_args", part))


def _rows(listed: str | None, known: list[str], method: str) -> list[str]:
    """The rows that a list names; all that are known without one."""
    named = listed.split(",") if listed else known
    unknown = [row for row in named if row not in known]
    if unknown:
        raise DiffcapError(f"{method} has no ablation {unknown[0]!r}; choose among {', '.join(known)}.")
    return named


def _lanes(rows: list[str]) -> list[list[str]]:
    """One after the other what has to wait for another row; those that are waited for begin first."""
    heads = sorted((row for row in rows if BEHIND.get(row) not in rows), key=lambda row: row not in BEHIND.values())
    return [[head, *(row for row in rows if BEHIND.get(row) == head)] for head in heads]


def _options(row: str, place: Path, seed: int) -> tuple[str, ...]:
    """The make variables that tell a row from the others."""
    if row not in EXTRA:
        return (f"ABLATION={row}",)
    return (f"EXTRA={EXTRA[row]}", f"CUB_RUN={place / f'pretrain-cub-{seed}'}")


if __name__ == "__main__":
    run(ablation)
