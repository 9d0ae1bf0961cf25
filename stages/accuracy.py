"""What more the same checkpoints give: beam search, averaged weights, an ensemble of the seeds, self-critical training; one table."""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from diffcap.experiment import Experiment
from diffcap.run_folder import AVERAGED, BEST, EVAL, FINETUNE, LAST, METRICS, REINFORCE, evaluation_of, report_of
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
    """Train every seed, decode it in every way, train it on by its own captions, and write table.json and table.md.

    What is there already, from an interrupted command or with fewer seeds, is not made again.

    Args:
        variables: of the experiments, in JSON; each is an option, too: --method scorer --dataset blocks.
        seeds: of the training, separated by commas; several give means and standard deviations, and an ensemble.
        steps: of the captioning; the method's settings by default.
        pretrain_steps: of the pre-training of methods that have one; the method's settings by default.
        reinforce_steps: of the self-critical training; its settings by default.
        keep: checkpoints that are averaged: so many kept ones of the last part of the training, and the last.
        beams: width of the beam search.
        length_penalty: of the beam search: the log-probability is divided by the number of words to this power.
        out: folder of the runs, and of the table in report/; runs/<dataset>/<method>-accuracy by default.

    Raises:
        DiffcapError: the seeds or a number are wrong, or a stage failed.
    """
    from diffcap.models.generation import check_search

    numbers = parse_seeds(seeds)
    if keep < 1:
        raise DiffcapError(f"--keep is {keep}; it must be at least 1.")
    check_search(beams, length_penalty, "--beams")
    base = Experiment(**variables)
    folder, place = base.folder, Path(out or f"runs/{base.dataset}/{base.method}-accuracy")
    shared = {**variables, "logger": "none"}
    # Before the seeds, which would write the same files at the same time.
    needs_negatives = base.method_spec.pretraining is not None and base.method_spec.pretraining.needs_negatives
    make("data", "extract negatives" if needs_negatives else "extract", shared)
    shared.pop("data", None)
    beam = f"beam{beams}-{length_penalty:g}"
    wide = f"--beams={beams}", f"--length_penalty={length_penalty}"

    def seed_of(number: int) -> None:
        home = place / str(number)
        training = [f"--run.keep={keep}", *steps_options(steps)]
        if steps:
            training.append(
                f"--run.checkpoint_every={max(1, steps // (4 * keep))}"
            )  # the kept ones: of the last quarter
        fixed = {**shared, "run": str(home), "seed": str(number)}
        options = {
            "pretrain": steps_options(pretrain_steps),
            "finetune": training,
            "reinforce": steps_options(reinforce_steps),
        }
        trained, averaged, reinforced = (home / stage / BEST for stage in (FINETUNE, AVERAGED, REINFORCE))
        make(f"seed {number}, captioning", "finetune", fixed, **options)
        captions(f"seed {number}, greedy", folder, trained, home / EVAL)
        captions(f"seed {number}, beams", folder, trained, home / f"{EVAL}-{beam}", *wide)
        if not _newer(averaged, home / FINETUNE / LAST):
            command = [sys.executable, "-m", "diffcap", "average", str(home / FINETUNE), "--out", str(averaged)]
            call(command, f"seed {number}, averaging")
        captions(f"seed {number}, averaged", folder, averaged, home / evaluation_of(AVERAGED))
        make(f"seed {number}, self-critical", "reinforce", fixed, **options)
        critical = home / evaluation_of(REINFORCE)
        captions(f"seed {number}, reinforced", folder, reinforced, critical)
        captions(f"seed {number}, reinforced, beams", folder, reinforced, home / f"{critical.name}-{beam}", *wide)

    in_parallel([partial(seed_of, number) for number in numbers])
    homes = [place / str(number) for number in numbers]
    rows: dict[str, list[Path]] = {
        "greedy": [home / EVAL for home in homes],
        f"beam search, {beams} beams": [home / f"{EVAL}-{beam}" for home in homes],
        "averaged checkpoints": [home / evaluation_of(AVERAGED) for home in homes],
        "reinforced": [home / evaluation_of(REINFORCE) for home in homes],
        f"reinforced, {beams} beams": [home / f"{evaluation_of(REINFORCE)}-{beam}" for home in homes],
    }
    if len(numbers) > 1:
        members = [home / FINETUNE / BEST for home in homes]
        together = place / f"ensemble-{'-'.join(map(str, numbers))}"
        captions(
            "the ensemble", folder, members[0], together, f"--ensemble={','.join(map(str, members[1:]))}", also=members
        )
        rows[f"ensemble of {len(numbers)} seeds"] = [together]
    from diffcap.report.accuracy import accuracy_table

    accuracy_table(folder, rows, place / report_of(FINETUNE))


def captions(title: str, folder: str, checkpoint: Path, out: Path, *options: str, also: Sequence[Path] = ()) -> None:
    """Caption and score the test split, unless that was done after the checkpoint (and the others) came to be."""
    if not all(_newer(out / METRICS, path) for path in (checkpoint, *also)):
        words = ["--checkpoint", str(checkpoint), "--out", str(out), "--folder", folder, *options]
        call([sys.executable, "-m", "diffcap", "eval", *words], title)


def _newer(path: Path, source: Path) -> bool:
    return path.is_file() and source.is_file() and path.stat().st_mtime_ns >= source.stat().st_mtime_ns


if __name__ == "__main__":
    run_command(accuracy)
