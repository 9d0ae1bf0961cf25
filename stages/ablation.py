"""A method beside its papers' ablations on one dataset: an experiment for every row and seed, then the table."""

from collections.abc import Mapping
from pathlib import Path

from diffcap.experiment import Experiment
from diffcap.methods import Ablation
from diffcap.run_folder import FINETUNE, PRETRAIN, report_of
from diffcap.runner import Job, make, parse_seeds, run_command, run_queues, write_report
from diffcap.utils.errors import DiffcapError
from diffcap.utils.settings import setting


def ablation(
    variables: dict[str, str],
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
        variables: of the experiments, in JSON; each is an option, too: --method scorer --dataset blocks.
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
    base = Experiment(**variables)
    method, dataset, table = base.method, base.dataset, base.method_spec.ablations
    if not table:
        raise DiffcapError(f"METHOD={method} has no ablations; choose another method.")
    chosen = _rows(rows, list(table), method)
    often = _rows(repeated, chosen, method)
    empty = [row for row in chosen if table[row].removes and not _has(base, str(table[row].removes))]
    chosen, often = ([row for row in some if row not in empty] for some in (chosen, often))
    without = "".join(f"Left out: {table[row].title}, which the method does not have on {dataset}." for row in empty)
    if not chosen:
        raise DiffcapError(f"--rows {rows} leaves no row: {without}")
    place = Path(out or f"runs/{dataset}/{method}-ablation")
    shared = {**variables, "logger": "none"}
    numbers = parse_seeds(seeds)
    more = [seed for seed in (parse_seeds(more_seeds) if more_seeds else []) if seed not in numbers]
    # Before the rows, two of which would write the same files at the same time.
    needs_negatives = base.method_spec.pretraining is not None and base.method_spec.pretraining.needs_negatives
    make("data", "extract negatives" if needs_negatives else "extract", shared)
    extra = sorted({name for row in chosen for name in table[row].extra.split(",") if name})
    if extra:
        make("more datasets", "extra", {**shared, "extra": ",".join(extra)})
    # The manifest is there now; its files need not be read again for every row.
    shared = {name: value for name, value in shared.items() if name not in ("data", "cub_data", "nabirds_data")}
    runs = [(row, seed) for among, of in ((chosen, numbers), (often, more)) for seed in of for row in among]
    jobs = {}
    for row, seed in runs:
        ablation, start = table[row], table[row].pretraining_of
        jobs[row, seed] = Job(
            f"{ablation.title}, seed {seed}",
            {
                **shared,
                "run": str(place / f"{row}-{seed}"),
                "seed": str(seed),
                **_variables(row, ablation, place, seed),
            },
            steps,
            pretrain_steps if ablation.pretrains else 0,
            place / f"{start}-{seed}" / PRETRAIN if (start, seed) in runs else None,
        )
    # Seed by seed, so that an interrupted command leaves whole tables of fewer seeds.
    run_queues(
        [
            [jobs[row, seed] for row in queue]
            for seed in [*numbers, *more]
            for queue in _queues([row for row in chosen if (row, seed) in jobs], table)
        ]
    )
    results = {table[row].title: [job for (name, _), job in jobs.items() if name == row] for row in chosen}
    remark = ["--remark", without] if without else []
    target = place / report_of(FINETUNE)
    write_report(base.folder, base.features, results, target, "--pictures", "0", "--attention", "0", *remark)


def _has(base: Experiment, part: str) -> bool:
    """Whether a part of the captioner is switched on in the fine-tuning on the dataset."""
    return bool(setting(base.config_files(FINETUNE), "model", "captioner", "init_args", part))


def _rows(listed: str | None, known: list[str], method: str) -> list[str]:
    """The rows that a list names; all that are known without one."""
    named = listed.split(",") if listed else known
    unknown = [row for row in named if row not in known]
    if unknown:
        raise DiffcapError(f"{method} has no ablation {unknown[0]!r}; choose among {', '.join(known)}.")
    return named


def _queues(rows: list[str], table: Mapping[str, Ablation]) -> list[list[str]]:
    """Rows that share a pre-training, or a stage of it on CUB, run one after the other; those that others wait for are first."""

    def waits_for(row: str) -> str | None:
        if table[row].pretraining_of in rows:
            return table[row].pretraining_of
        alike = [name for name in rows if "cub" in table[name].extra.split(",")] if "cub" in table[row].extra else []
        return alike[0] if alike and alike[0] != row else None

    waiting = {row: waits_for(row) for row in rows}
    heads = sorted((row for row in rows if not waiting[row]), key=lambda row: row not in waiting.values())
    return [[head, *(row for row in rows if waiting[row] == head)] for head in heads]


def _variables(row: str, ablation: Ablation, place: Path, seed: int) -> dict[str, str]:
    """The variables in which a row differs from the others."""
    if not ablation.extra:
        return {"ablation": row}
    return {"extra": ablation.extra, "cub_run": str(place / f"pretrain-cub-{seed}")}


if __name__ == "__main__":
    run_command(ablation)
