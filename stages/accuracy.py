"""Compare decoding and training variants: beam search, averaged weights, an ensemble of the seeds, self-critical training."""

import sys
from functools import partial
from pathlib import Path

from diffcap import record
from diffcap.experiment import Experiment
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
from diffcap.runner import call, in_parallel, make, parse_seeds, run_command, steps_options
from diffcap.utils.errors import DiffcapError


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

    Existing results, of an interrupted command or of fewer seeds, are reused.

    Args:
        variables: Variables of the experiments, in JSON; each is also an option: --method scorer --dataset blocks.
        seeds: Training seeds, separated by commas; several give means and standard deviations, and an ensemble.
        steps: Fine-tuning steps; by default as in the method's settings.
        pretrain_steps: Pre-training steps, for methods that have it; by default as in the method's settings.
        reinforce_steps: Steps of the self-critical training; by default as in its settings.
        keep: Number of periodic checkpoints from the last quarter of the training that are averaged with the last one.
        beams: Beam size.
        length_penalty: Exponent of the caption's length by which the log-probability of a hypothesis is divided.
        out: Folder of the runs, and of the table in report/; runs/<dataset>/<method>-accuracy by default.
    """
    from diffcap.models.generation import check_search

    numbers = parse_seeds(seeds)
    if keep < 1:
        raise DiffcapError(f"--keep is {keep}; it must be at least 1.")
    check_search(beams, length_penalty, "--beams")
    base = Experiment(**variables)
    folder, place = base.folder, Path(out or f"runs/{base.dataset}/{base.method}-accuracy")
    shared = {**variables, "logger": "none"}
    # These run before the seeds, because two seeds would write the same files at the same time.
    needs_negatives = base.method_spec.pretraining is not None and base.method_spec.pretraining.needs_negatives
    make("data", "extract negatives" if needs_negatives else "extract", shared)
    shared.pop("data", None)
    beam = f"beam{beams}-{length_penalty:g}"
    beam_options = f"--beams={beams}", f"--length_penalty={length_penalty}"
    averaged_eval, reinforced_eval = result_folder_name(AVERAGED, EVAL), result_folder_name(REINFORCE, EVAL)

    def run_seed(number: int) -> None:
        home = place / str(number)
        training = [f"--run.keep_last_k={keep}", *steps_options(steps)]
        if steps:
            training.append(f"--run.checkpoint_every={max(1, steps // (4 * keep))}")  # kept: those of the last quarter
        fixed = {**shared, "run": str(home), "seed": str(number)}
        before, after = steps_options(pretrain_steps), steps_options(reinforce_steps)
        options = {"pretrain": before, "finetune": training, "reinforce": after}
        make(f"seed {number}, captioning", "finetune", fixed, **options)
        trained, averaged, reinforced = (home / stage / BEST for stage in (FINETUNE, AVERAGED, REINFORCE))
        captions(f"seed {number}, greedy", folder, trained, home / EVAL)
        captions(f"seed {number}, beams", folder, trained, home / f"{EVAL}-{beam}", *beam_options)
        average(f"seed {number}, averaging", home / FINETUNE, keep, averaged)
        captions(f"seed {number}, averaged", folder, averaged, home / averaged_eval)
        make(f"seed {number}, self-critical", "reinforce", fixed, **options)
        captions(f"seed {number}, reinforced", folder, reinforced, home / reinforced_eval)
        captions(
            f"seed {number}, reinforced, beams", folder, reinforced, home / f"{reinforced_eval}-{beam}", *beam_options
        )

    in_parallel([partial(run_seed, number) for number in numbers], int(variables.get("devices", 1)))
    homes = [place / str(number) for number in numbers]
    folders = {
        "greedy": EVAL,
        f"beam search, {beams} beams": f"{EVAL}-{beam}",
        "averaged checkpoints": averaged_eval,
        "reinforced": reinforced_eval,
        f"reinforced, {beams} beams": f"{reinforced_eval}-{beam}",
    }
    rows = {title: [home / name for home in homes] for title, name in folders.items()}
    if len(numbers) > 1:
        members = [home / FINETUNE / BEST for home in homes]
        ensemble = place / f"ensemble-{'-'.join(map(str, numbers))}"
        option = f"--ensemble={','.join(map(str, members[1:]))}"
        captions("the ensemble", folder, members[0], ensemble, option)
        rows[f"ensemble of {len(numbers)} seeds"] = [ensemble]
    from diffcap.report.comparison import accuracy_table

    accuracy_table(folder, rows, place / REPORT)


def average(title: str, training: Path, keep: int, out: Path) -> None:
    """Average the last periodic checkpoints of a training and last.ckpt, unless `out` is their average already."""
    files = [*sorted(training.glob(STEP_CHECKPOINT_GLOB))[-keep:], training / LAST]
    path = out.with_name("average.done.json")
    old = record.read(path)
    described = record.describe_files(files, old)
    made_of = record.result_id({}, described)
    if old.get("id") != made_of or record.lost_products(path, old):
        call([sys.executable, "-m", "diffcap", "average", *map(str, files), "--out", str(out)], title)
        record.write(path, record.make("", made_of, described, [out]))


def captions(title: str, folder: str, checkpoint: Path, out: Path, *options: str) -> None:
    """Caption and score the test split."""
    words = ["--checkpoint", str(checkpoint), "--out", str(out), "--folder", folder, *options]
    call([sys.executable, "-m", "diffcap", "eval", *words], title)


if __name__ == "__main__":
    run_command(accuracy)
