"""Compare decoding and training variants: beam search, averaged weights, an ensemble of the seeds, self-critical training."""

import json
import sys
from functools import partial
from pathlib import Path

from diffcap import record
from diffcap.experiment import Experiment, parse
from diffcap.pipeline import check_used
from diffcap.run_folder import (
    AVERAGED,
    BEST,
    EVAL,
    FINETUNE,
    LAST,
    REINFORCE,
    REPORT,
    STEP_CHECKPOINT_GLOB,
    result_folder_name,
)
from diffcap.runner import call, in_parallel, make, parse_seeds, steps_options
from diffcap.utils.console import run
from diffcap.utils.errors import DiffcapError, plain_errors


def accuracy(
    variables: dict[str, str],
    seeds: str = "1,2,3",
    steps: int | None = None,
    pretrain_steps: int | None = None,
    reinforce_steps: int | None = None,
    keep: int = 5,
    beams: int = 5,
    length_penalty: float = 1.0,
    out: str | None = None,
) -> None:
    """Train each seed, evaluate every variant, and write table.json and table.md.

    Trainings and evaluations of earlier commands are reused, for example if a command was interrupted, or had fewer seeds.

    Args:
        variables: Variables of the experiments, in JSON. Each can also be given as an option: --method scorer --dataset blocks.
        seeds: Training seeds, separated by commas; several give means and standard deviations, and an ensemble.
        steps: Fine-tuning steps; by default as in the method's settings.
        pretrain_steps: Pre-training steps, for methods that have it; by default as in the method's settings.
        reinforce_steps: Steps of the self-critical training; by default as in its settings.
        keep: Number of periodic checkpoints from the last quarter of the training that are averaged with last.ckpt.
        beams: Beam size.
        length_penalty: The log-probability of a hypothesis is divided by its number of words to the power of this exponent.
        out: Folder of the runs, and of the table in report/; runs/<dataset>/<method>-accuracy by default.
    """
    from diffcap.models.generation import check_search

    seed_numbers = parse_seeds(seeds)
    if keep < 1:
        raise DiffcapError(f"--keep is {keep}; it must be at least 1.")
    check_search(beams, length_penalty, "--beams")
    base = Experiment(**variables)
    check_used(variables, [FINETUNE], [base])
    out_folder = Path(out or f"runs/{base.dataset}/{base.method}-accuracy")
    shared_variables = {**variables, "logger": "none"}
    # The stages that all seeds share run first, because two seeds would write the same files at the same time.
    needs_negatives = base.method_spec.pretraining is not None and base.method_spec.pretraining.needs_negatives
    make("data", "extract negatives" if needs_negatives else "extract", shared_variables)
    shared_variables.pop("data", None)  # the folder of the dataset's files, which only the stage data reads
    beam = f"beam{beams}-{length_penalty:g}"  # ending of the names of evaluations with beam search
    with_beams = f"--beams={beams}", f"--length_penalty={length_penalty}"
    averaged_eval, reinforced_eval = result_folder_name(AVERAGED, EVAL), result_folder_name(REINFORCE, EVAL)

    def evaluate(title: str, checkpoint: Path, out: Path, *options: str) -> None:
        words = ["--checkpoint", str(checkpoint), "--out", str(out), "--folder", base.folder]
        call(["eval", *words, *options], title)

    def run_seed(number: int) -> None:
        run_folder = out_folder / str(number)
        finetune_options = [f"--run.keep_last_k={keep}", *steps_options(steps)]
        if steps:  # so the last `keep` checkpoints are those of the last quarter
            finetune_options.append(f"--run.checkpoint_every={max(1, steps // (4 * keep))}")
        options = {
            "pretrain": steps_options(pretrain_steps),
            "finetune": finetune_options,
            "reinforce": steps_options(reinforce_steps),
        }
        seed_variables = {**shared_variables, "run": str(run_folder), "seed": str(number)}
        make(f"seed {number}, captioning", "finetune", seed_variables, **options)
        trained, averaged, reinforced = (run_folder / stage / BEST for stage in (FINETUNE, AVERAGED, REINFORCE))
        evaluate(f"seed {number}, greedy", trained, run_folder / EVAL)
        evaluate(f"seed {number}, beams", trained, run_folder / f"{EVAL}-{beam}", *with_beams)
        average(f"seed {number}, averaging", run_folder / FINETUNE, keep, averaged)
        evaluate(f"seed {number}, averaged", averaged, run_folder / averaged_eval)
        make(f"seed {number}, self-critical", "reinforce", seed_variables, **options)
        evaluate(f"seed {number}, reinforced", reinforced, run_folder / reinforced_eval)
        evaluate(f"seed {number}, reinforced, beams", reinforced, run_folder / f"{reinforced_eval}-{beam}", *with_beams)

    in_parallel([partial(run_seed, number) for number in seed_numbers], devices=int(variables.get("devices", 1)))
    run_folders = [out_folder / str(number) for number in seed_numbers]
    evaluation_names = {
        "greedy": EVAL,
        f"beam search, {beams} beams": f"{EVAL}-{beam}",
        "averaged checkpoints": averaged_eval,
        "reinforced": reinforced_eval,
        f"reinforced, {beams} beams": f"{reinforced_eval}-{beam}",
    }
    rows = {title: [run_folder / name for run_folder in run_folders] for title, name in evaluation_names.items()}
    if len(seed_numbers) > 1:
        members = [run_folder / FINETUNE / BEST for run_folder in run_folders]
        ensemble = out_folder / f"ensemble-{'-'.join(map(str, seed_numbers))}"
        evaluate("the ensemble", members[0], ensemble, f"--ensemble={','.join(map(str, members[1:]))}")
        rows[f"ensemble of {len(seed_numbers)} seeds"] = [ensemble]
    from diffcap.report.comparison import accuracy_table

    accuracy_table(base.folder, rows, out_folder / REPORT)


def average(title: str, training_folder: Path, keep: int, out: Path) -> None:
    """Average the last periodic checkpoints of a training and last.ckpt, unless `out` is their average already."""
    files = [*sorted(training_folder.glob(STEP_CHECKPOINT_GLOB))[-keep:], training_folder / LAST]
    record_file = out.with_name("average.done.json")
    old_record = record.read(record_file)
    file_entries = record.describe_files(files, old_record)
    result_id = record.result_id({}, file_entries)  # hash of the contents of the files
    if old_record.get("id") != result_id or record.lost_products(record_file, old_record):
        call(["average", *map(str, files), "--out", str(out)], title)
        record.write(record_file, record.make("", result_id, file_entries, [out]))


if __name__ == "__main__":
    with plain_errors():
        given, options = parse(sys.argv[1:])  # `given` are variables of an experiment
    run(accuracy, ["--variables", json.dumps(given), *options])
