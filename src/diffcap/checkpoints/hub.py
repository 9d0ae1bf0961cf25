"""Export a checkpoint to a folder, with the scores of its weights, and upload it to the Hugging Face Hub with a model card."""

import glob
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from diffcap.checkpoints.base_models import base_licence
from diffcap.checkpoints.hub_access import check_repository_name, hub_errors
from diffcap.checkpoints.loading import PNG_GLOB
from diffcap.checkpoints.reading import CAPTIONING_STAGES, read_checkpoint, weights_hash, write_folder
from diffcap.records import read_json, write_json
from diffcap.registry import methods
from diffcap.run_folder import METRICS, REPORT, find_metrics_files, read_object, result_folder_name
from diffcap.utils.console import echo
from diffcap.utils.errors import DiffcapError

TASK = "image-to-text"  # as the Hub names the task
METRIC_COLUMNS = ("BLEU-4", "METEOR", "ROUGE-L", "CIDEr-D", "SPICE")  # of the model card's table
CARD_TEMPLATE = Path(__file__).with_name("model_card.md.j2")


class Scores(NamedTuple):
    """The scores of a checkpoint, or the reason why there are none."""

    metrics: dict[str, Any] | None  # content of metrics.json
    file: Path | None  # path of metrics.json
    missing_reason: str = ""


def find_scores(checkpoint: Path, content: dict[str, Any], metrics_file: str | Path | None = None) -> Scores:
    """Find the scores of the weights in `content`, which was read from `checkpoint`: in `metrics_file`, or else next to `checkpoint`."""
    expected_hash = weights_hash(content)
    if metrics_file is not None:
        metrics = read_json(metrics_file, "metrics", "write it with `make eval`")
        if reason := _mismatch_reason(metrics, expected_hash):
            raise DiffcapError(f"{metrics_file}: {reason}; evaluate {checkpoint} itself, or omit --metrics.")
        return Scores(metrics, Path(metrics_file))
    reasons = []
    for path in find_metrics_files(checkpoint):
        metrics = read_object(path)
        reason = _mismatch_reason(metrics, expected_hash)
        if reason is None:
            return Scores(metrics, path)
        reasons.append(f"{path.parent.name}/{path.name} {reason}")
    return Scores(None, None, "; ".join(reasons) or "there is no evaluation next to the checkpoint")


def _mismatch_reason(metrics: Any, expected_hash: str) -> str | None:
    """Return why the scores do not belong to the weights with this hash; None if they do."""
    if not isinstance(metrics, dict) or not isinstance(metrics.get("groups"), dict):
        return 'is not a metrics.json of diffcap ("groups" is missing)'
    checkpoints = (metrics.get("provenance") or {}).get("checkpoints")
    if not checkpoints:
        return "does not name the weights that it evaluated"
    if len(checkpoints) > 1:
        return f"belongs to an ensemble of {len(checkpoints)} checkpoints"
    return None if checkpoints[0].get("weights_sha256") == expected_hash else "belongs to other weights"


def export(checkpoint: str | Path, folder: str | Path) -> Scores:
    """Write a checkpoint as model.safetensors and config.json, with the metrics.json of its weights if there is one."""
    checkpoint, folder = Path(checkpoint), Path(folder)
    content = read_checkpoint(checkpoint)
    scores = find_scores(checkpoint, content)
    write_folder(folder, content)
    if scores.metrics is not None:
        write_json(folder / METRICS, scores.metrics)
    elif folder.absolute() != checkpoint.absolute():
        (folder / METRICS).unlink(missing_ok=True)  # scores of another checkpoint that was exported to this folder
    return scores


def push(
    checkpoint: str | Path,
    name: str,
    metrics_file: str | Path | None = None,
    image_files: Sequence[str | Path] | None = None,
    license: str = "other",
    private: bool = False,
) -> str:
    """Upload a captioner as model.safetensors and config.json, with a model card. Return the URL of the repository.

    The metrics.json and PNG files of an earlier upload are deleted from the repository. The card shows the PNG files `image_files`, or
    else those of the report or exported folder. `license` is the Hub's identifier of the weights' licence. With `private`, a new
    repository is private, and an existing public repository is refused.
    """
    check_repository_name(name)
    checkpoint = Path(checkpoint)
    content = read_checkpoint(checkpoint)
    stage = content["diffcap"]["stage"]
    if stage not in CAPTIONING_STAGES:
        raise DiffcapError(
            f"{checkpoint}: a checkpoint of the {stage} stage cannot caption; push one of the finetune or reinforce stage."
        )
    scores = find_scores(checkpoint, content, metrics_file)
    if scores.metrics is None:
        echo(f"note: the model card has no scores: {scores.missing_reason}; `make eval` writes them.", err=True)
    stage_folder = checkpoint.absolute().parent
    report_folder = stage_folder.parent / result_folder_name(stage_folder.name, REPORT)
    png_files = (checkpoint if checkpoint.is_dir() else report_folder).glob(PNG_GLOB)
    card_images = sorted(png_files) if image_files is None else [Path(file) for file in image_files]
    image_names = [path.name for path in card_images]
    for path in card_images:
        if not path.is_file():
            raise DiffcapError(f"{path}: file not found; check --pictures.")
        if path.suffix != ".png":
            raise DiffcapError(f"{path}: not a .png file; give PNG files as --pictures.")
        if image_names.count(path.name) > 1:  # all are uploaded to one folder
            raise DiffcapError(f"{path}: another file of --pictures is also named {path.name}; rename one.")
    from huggingface_hub import HfApi

    arguments = content["diffcap"]["hyperparameters"]  # of the captioner's constructor
    licence_of_base = base_licence(arguments["base"], arguments.get("revision")) if "base" in arguments else None
    if "base" in arguments and not arguments.get("revision"):
        arguments["base"] = Path(arguments["base"]).name  # the path of a local folder is private
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_folder(folder, content)
        for path in card_images:
            (folder / path.name).write_bytes(path.read_bytes())
        if scores.metrics is not None:
            write_json(folder / METRICS, scores.metrics)
        card = model_card(name, content, scores, image_names, license, licence_of_base)
        (folder / "README.md").write_text(card, encoding="utf-8")
        api = HfApi()
        with hub_errors(name):
            api.create_repo(name, private=private or None, exist_ok=True)
            if private and not api.repo_info(name).private:
                raise DiffcapError(
                    f"{name}: the repository exists and is public, so nothing was uploaded; make it private in its settings "
                    "on the Hub, or omit --private."
                )
            old_images = [file for file in api.list_repo_files(name) if "/" not in file and Path(file).match(PNG_GLOB)]
            commit = api.upload_folder(
                repo_id=name,
                folder_path=folder,
                commit_message="Upload from diffcap",
                delete_patterns=[METRICS, *map(glob.escape, old_images)],
            )
    return str(getattr(commit, "repo_url", None) or name)


def model_card(
    name: str,
    content: dict[str, Any],
    scores: Scores,
    images: Sequence[str],
    license: str,
    licence_of_base: str | None = None,
) -> str:
    """Return the README.md of a repository on the Hub. The page shows `images`, which are names of PNG files in the same folder."""
    from huggingface_hub import EvalResult, ModelCard, ModelCardData

    metadata = content["diffcap"]
    model_name = name.rpartition("/")[2]
    method = methods().get(metadata["method"])
    hyperparameters = metadata["hyperparameters"]
    protocol = (scores.metrics or {}).get("protocol") or {}
    groups = {  # group of pairs ("total", ...) -> scores of `METRIC_COLUMNS` times 100, without values that are not numbers
        group: {name: round(100 * row[name], 2) for name in METRIC_COLUMNS if isinstance(row.get(name), int | float)}
        for group, row in (scores.metrics["groups"] if scores.metrics else {}).items()
        if isinstance(row, dict)
    }
    results = [
        EvalResult(
            task_type=TASK,
            dataset_type=metadata["dataset"],
            dataset_name=metadata["dataset"],
            dataset_split=protocol.get("split"),
            metric_type=metric.lower(),
            metric_name=metric,
            metric_value=value,
        )
        for metric, value in groups.get("total", {}).items()
    ]
    card_data = ModelCardData(
        license=license,
        library_name="diffcap",
        pipeline_tag=TASK,
        tags=["image-difference-captioning", "change-captioning", metadata["method"]],
        language="en",
        model_name=model_name,
        eval_results=results or None,
        base_model=hyperparameters["base"] if hyperparameters.get("revision") else None,
    )
    card = ModelCard.from_template(
        card_data,
        template_path=str(CARD_TEMPLATE),
        repository=name,
        model_name=model_name,
        metadata=metadata,
        title=method.title if method else metadata["method"],
        paper=method.paper if method and not method.base_model_module else "",
        base=hyperparameters if "base" in hyperparameters else None,
        licence_of_base=licence_of_base,
        steps=content["global_step"],
        groups=groups,
        columns=[metric for metric in METRIC_COLUMNS if any(metric in row for row in groups.values())],
        protocol=protocol,
        missing_reason=scores.missing_reason,
        images=images,
    )
    return f"{card}\n"
