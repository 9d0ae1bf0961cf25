"""What stands where in a run's folder, `runs/<dataset>/<method>`.

```
pretrain/ finetune/ reinforce/   a stage each: config.yaml, identity.json, logs/, last.ckpt, best.ckpt, finished.json
averaged/best.ckpt               the mean of kept checkpoints of the fine-tuning
eval/ reinforce-eval/ ...        an evaluation each: metrics.json, predictions.json, references.json, groups.json
report/ reinforce-report/        tables and pictures
```
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from diffcap.errors import DiffcapError
from diffcap.settings import setting

PRETRAIN, FINETUNE, REINFORCE = "pretrain", "finetune", "reinforce"
STAGES = (PRETRAIN, FINETUNE, REINFORCE)  # each begins with what the one before it has made, where there is one
AVERAGED, EVAL = "averaged", "eval"
BEST, LAST = "best.ckpt", "last.ckpt"
KEPT = "step-*.ckpt"
CONFIGURATION, IDENTITY, FINISHED, LOGS = "config.yaml", "identity.json", "finished.json", "logs"
METRICS, PREDICTIONS, REFERENCES, GROUPS = "metrics.json", "predictions.json", "references.json", "groups.json"
UNSCORED = "predictions-unscored.json"


def metrics_by(tokenizer: str) -> str:
    """The file of the scores by a tokenizer other than the protocol's, beside metrics.json."""
    return f"metrics-{tokenizer}.json"


def evaluation_of(stage: str) -> str:
    """The folder of the evaluation of a stage's best.ckpt: eval of the fine-tuning's, `<stage>-eval` of another's."""
    return EVAL if stage == FINETUNE else f"{stage}-{EVAL}"


def report_of(stage: str) -> str:
    """The folder of the report on a stage's best.ckpt, as `evaluation_of`."""
    return "report" if stage == FINETUNE else f"{stage}-report"


class Chain(NamedTuple):
    """The trainings behind a checkpoint: a run's folder, and which of its stages, in their order."""

    run: Path
    stages: tuple[str, ...]

    def finished(self) -> list[Path]:
        """The finished.json of every one that is: of the run's own stages, and of those of other runs that they began with."""
        folders = [self.run / stage for stage in self.stages]
        folders = [folder for folder in folders if (folder / FINISHED).is_file()]
        own = {folder.name for folder in folders}
        for folder in folders:  # which grow
            start = setting([folder / CONFIGURATION], "model", "init_from")
            before = Path(start).parent if start else None
            if before and before.name not in own and before not in folders and (before / FINISHED).is_file():
                folders.append(before)
        return [folder / FINISHED for folder in folders]


def find_evaluation(named: str | Path) -> Path:
    """The folder of an evaluation, or `eval` of a run's folder.

    Raises:
        DiffcapError: it holds no metrics.json; other evaluations of the run are named.
    """
    folder = Path(named)
    for place in (folder, folder / EVAL):
        if (place / METRICS).is_file():
            return place
    others = sorted(path.parent.name for path in folder.glob(f"*/{METRICS}"))
    if others:
        raise DiffcapError(
            f"{folder}: has no {EVAL}, but {', '.join(others)}; name one, as in {folder / others[0]}, or run `make eval`."
        )
    raise DiffcapError(
        f"{folder / EVAL / METRICS}: no scores there; give the folder of an evaluated run, or run `make eval`."
    )


def checkpoints_of(evaluation: Path, metrics: Mapping[str, Any]) -> list[Path]:
    """The checkpoint whose captions were scored, or the several of an ensemble.

    Args:
        evaluation: its folder. metrics: its metrics.json; one of an earlier version does not name them: then it is best.ckpt of
            the stage that the folder is named after.
    """
    notes = metrics.get("provenance") or {}
    if notes.get("checkpoints"):
        return [Path(os.path.normpath(evaluation / one["file"])) for one in notes["checkpoints"]]
    if notes.get("ensemble"):
        return [Path(path) for path in notes["ensemble"]]
    stage = next((name for name in (*STAGES, AVERAGED) if evaluation.name.startswith(evaluation_of(name))), FINETUNE)
    return [evaluation.parent / stage / BEST]


def chain_of(checkpoint: Path) -> Chain:
    """What was trained for a checkpoint of a run: of a reinforced one the fine-tuning before it, too."""
    stage = checkpoint.parent.name
    last = STAGES.index(stage) if stage in STAGES else STAGES.index(FINETUNE)  # averages are of the fine-tuning
    return Chain(checkpoint.parent.parent, STAGES[: last + 1])


def evaluations_near(checkpoint: Path) -> Sequence[Path]:
    """The metrics.json of a checkpoint's run, that of its own stage first; for an exported folder its own alone."""
    if checkpoint.is_dir():
        return [path for path in (checkpoint / METRICS,) if path.is_file()]
    run = checkpoint.absolute().parent.parent
    first = run / evaluation_of(checkpoint.parent.name) / METRICS
    return [*([first] if first.is_file() else []), *sorted(set(run.glob(f"*/{METRICS}")) - {first})]
