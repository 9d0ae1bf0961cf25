"""The ablation table of a method on one dataset: one experiment per row and seed, then the table."""

import os
from collections.abc import Mapping
from pathlib import Path

from diffcap.experiment import Experiment
from diffcap.registry import Ablation
from diffcap.run_folder import FINETUNE, PRETRAIN, PRETRAIN_EXTRA, REPORT
from diffcap.runner import Job, make, parse_seeds, run_command, run_queues, write_report
from diffcap.stages import is_made, needed_by
from diffcap.utils.errors import DiffcapError


def ablation(
    variables: dict[str, str],
    seeds: str = "1234",
    steps: int | None = None,
    pretrain_steps: int | None = None,
    rows: str | None = None,
    more_seeds: str | None = None,
    repeated: str | None = None,
    validations: int = 4,
    out: str | None = None,
) -> None:
    """Train and score every row with the same number of steps, and write the table: BLEU-4, METEOR, ROUGE-L, CIDEr-D, by change type.

    A row that leaves out a component is skipped if the method does not have it on this dataset. A row with photos of birds is skipped
    on a rendered dataset. A remark below the table says so.

    Args:
        variables: Variables of the experiments, in JSON; each is also an option: --method scorer --dataset blocks.
        seeds: Training seeds, separated by commas; several give means and standard deviations.
        steps: Fine-tuning steps of every row; by default as in the method's settings.
        pretrain_steps: Steps of each pre-training, including one before it on a dataset of EXTRA; by default as in the settings.
        rows: Rows to train, separated by commas; all by default. Names are the ablations in configs/method/<method>.yaml. If a row
            uses more datasets, prepare them with `make data` before.
        more_seeds: Additional seeds, for the rows in `repeated` only.
        repeated: Rows with additional seeds, separated by commas; all by default.
        validations: Number of validations of a stage whose steps are given. The best checkpoint is evaluated; curves.png shows all.
        out: Folder of the runs and of the table; runs/<dataset>/<method>-ablation by default.
    """
    base = Experiment(**variables)
    method, dataset, ablations = base.method, base.dataset, base.method_spec.ablations
    if not ablations:
        raise DiffcapError(f"METHOD={method} has no ablations; choose another method.")
    chosen_rows = _rows(rows, list(ablations), method)
    repeated_rows = _rows(repeated, chosen_rows, method)
    reasons = {row: _reason_to_skip(base, ablations[row], variables) for row in chosen_rows}
    skipped = {row: f"Skipped: {ablations[row].title}, because {reason}." for row, reason in reasons.items() if reason}
    chosen_rows = [row for row in chosen_rows if row not in skipped]
    repeated_rows = [row for row in repeated_rows if row not in skipped]
    remark = " ".join(skipped.values())
    if not chosen_rows:
        raise DiffcapError(f"--rows {rows}: no row is left. {remark}")
    out_folder = Path(out or f"runs/{dataset}/{method}-ablation")
    shared_variables = {**variables, "logger": "none"}
    first_seeds = parse_seeds(seeds)
    other_seeds = [seed for seed in (parse_seeds(more_seeds) if more_seeds else []) if seed not in first_seeds]
    # The stages that all rows share run first, because two rows would write the same files at the same time.
    needs_negatives = base.method_spec.pretraining is not None and base.method_spec.pretraining.needs_negatives
    make("data", "extract negatives" if needs_negatives else "extract", shared_variables)
    for extra in sorted({ablations[row].extra for row in chosen_rows} - {""}):  # further pre-training datasets (EXTRA)
        with_extra = Experiment(**{**shared_variables, "extra": extra})
        for stage, needed in needed_by(with_extra, [PRETRAIN]):
            if needed is not with_extra and stage != "data":
                make(needed.dataset, stage, needed.explicit_values)
    # The dataset is prepared now. Without the variable `data`, its files are not read again for every row.
    shared_variables = {name: value for name, value in shared_variables.items() if name != "data"}
    plan = (chosen_rows, first_seeds), (repeated_rows, other_seeds)
    runs = [(row, seed) for names, row_seeds in plan for seed in row_seeds for row in names]
    jobs = {}
    for row, seed in runs:
        ablation, pretrained_row = ablations[row], ablations[row].pretraining_of
        jobs[row, seed] = Job(
            f"{ablation.title}, seed {seed}",
            {
                **shared_variables,
                "run": str(out_folder / f"{row}-{seed}"),
                "seed": str(seed),
                **({"extra": ablation.extra} if ablation.extra else {"ablation": row}),
            },
            steps,
            pretrain_steps if ablation.pretrains else 0,
            out_folder / f"{pretrained_row}-{seed}" / PRETRAIN if (pretrained_row, seed) in runs else None,
            validations,
        )
        _share_first_pretraining(Experiment(**jobs[row, seed].variables), out_folder / f"pretrain-extra-{seed}")
    # One seed after the other, so that an interrupted command leaves complete tables of fewer seeds.
    run_queues(
        [
            [jobs[row, seed] for row in queue]
            for seed in [*first_seeds, *other_seeds]
            for queue in _queues([row for row in chosen_rows if (row, seed) in jobs], ablations)
        ]
    )
    results = {ablations[row].title: [job for (name, _), job in jobs.items() if name == row] for row in chosen_rows}
    options = ["--pictures", "0", "--attention", "0", *(["--remark", remark] if remark else [])]
    write_report(base.folder, base.features, results, out_folder / REPORT, *options)


def _reason_to_skip(base: Experiment, row: Ablation, variables: dict[str, str]) -> str | None:
    """Return why a row is not trained; None if it is trained. `row.removes` names the component that the row leaves out."""
    if row.removes and not base.setting(FINETUNE, "model", "captioner", "init_args", row.removes):
        return f"the method has no such component on {base.dataset}"
    if row.extra and base.dataset_spec.rendered:
        return f"{base.dataset} has no photos of birds"
    others = Experiment(**{**variables, "extra": row.extra}).extra_experiments if row.extra else []
    return next((f"{other.folder} is not there" for other in others if not is_made("data", other)), None)


def _rows(listed: str | None, known: list[str], method: str) -> list[str]:
    """Return the rows in a comma-separated list; all known rows by default."""
    named = listed.split(",") if listed else known
    unknown = [row for row in named if row not in known]
    if unknown:
        raise DiffcapError(f"{method} has no ablation {unknown[0]!r}; choose from {', '.join(known)}.")
    return named


def _queues(rows: list[str], ablations: Mapping[str, Ablation]) -> list[list[str]]:
    """Make queues of rows. Rows that share a pre-training (on their dataset or on EXTRA) are in one queue, after the row that trains it."""

    def find_awaited_row(row: str) -> str | None:
        if ablations[row].pretraining_of in rows:
            return ablations[row].pretraining_of
        first_extra = ablations[row].extra.partition(",")[0]
        sharing_rows = [name for name in rows if first_extra and ablations[name].extra.partition(",")[0] == first_extra]
        return sharing_rows[0] if sharing_rows and sharing_rows[0] != row else None

    awaited = {row: find_awaited_row(row) for row in rows}  # row -> the row that it waits for
    first_rows = sorted((row for row in rows if not awaited[row]), key=lambda row: row not in awaited.values())
    return [[first, *(row for row in rows if awaited[row] == first)] for first in first_rows]


def _share_first_pretraining(experiment: Experiment, shared_folder: Path) -> None:
    """Link the folder of the pre-training on the first dataset of EXTRA to a folder that several rows share."""
    link = experiment.stage_folder(PRETRAIN_EXTRA)
    if experiment.first_dataset and not link.exists():
        shared_folder.mkdir(parents=True, exist_ok=True)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(Path(os.path.relpath(shared_folder, link.parent)))


if __name__ == "__main__":
    run_command(ablation)
