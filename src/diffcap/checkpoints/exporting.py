"""Other forms of a checkpoint: the exported folder with the scores of its weights, and transformers' forms of a fine-tuned model."""

import re
from pathlib import Path
from typing import Any, Literal, NamedTuple

from diffcap.checkpoints.loading import load
from diffcap.checkpoints.reading import read_checkpoint, weights_hash, write_folder
from diffcap.records import read_json, write_json
from diffcap.run_folder import METRICS, related_evaluations
from diffcap.utils.errors import DiffcapError

Form = Literal["peft", "merged"]


class Scores(NamedTuple):
    """The metrics.json of a checkpoint and its path, or the reason why there is none."""

    metrics: dict[str, Any] | None
    file: Path | None
    missing_reason: str = ""


def find_scores(checkpoint: Path, state: dict[str, Any], metrics_file: str | Path | None = None) -> Scores:
    """Find the evaluation of a checkpoint's weights.

    Args:
        checkpoint: the file or the exported folder. state: its content, see `read_checkpoint`.
        metrics_file: metrics.json to use; None searches the evaluations of the same run, or the exported folder.
    """
    digest = weights_hash(state)
    if metrics_file is not None:
        metrics = _read_metrics(Path(metrics_file))
        if fault := _mismatch_reason(metrics, digest):
            raise DiffcapError(f"{metrics_file}: {fault}; evaluate {checkpoint} itself, or omit --metrics.")
        return Scores(metrics, Path(metrics_file))
    faults = []
    for path in related_evaluations(checkpoint):
        try:
            metrics = _read_metrics(path)
        except DiffcapError:
            faults.append(f"{path.parent.name}/{path.name} is not a metrics.json of diffcap")
            continue
        fault = _mismatch_reason(metrics, digest)
        if fault is None:
            return Scores(metrics, path)
        faults.append(f"{path.parent.name}/{path.name} {fault}")
    return Scores(None, None, "; ".join(faults) or "there is no evaluation next to the checkpoint")


def _read_metrics(path: Path) -> dict[str, Any]:
    metrics = read_json(path, "metrics", "write it with `make eval`")
    if not isinstance(metrics, dict) or not isinstance(metrics.get("groups"), dict):
        raise DiffcapError(f'{path}: not a metrics.json of diffcap, "groups" is missing; write it with `make eval`.')
    protocol, provenance = (metrics.get(key) or {} for key in ("protocol", "provenance"))
    evaluated = (provenance.get("checkpoints") or []) if isinstance(provenance, dict) else None
    if (
        not isinstance(protocol, dict)
        or not isinstance(evaluated, list)
        or not all(isinstance(e, dict) for e in evaluated)
    ):
        raise DiffcapError(
            f'{path}: not a metrics.json of diffcap, its "protocol" or "provenance" has another form; write it with `make eval`.'
        )
    return metrics


def _mismatch_reason(metrics: dict[str, Any], digest: str) -> str | None:
    """Why these scores do not belong to the weights with this hash; None if they do."""
    evaluated = (metrics.get("provenance") or {}).get("checkpoints")
    if not evaluated:
        return "does not name the weights that it evaluated"
    if len(evaluated) > 1:
        return f"belongs to an ensemble of {len(evaluated)} checkpoints"
    return None if evaluated[0].get("weights_sha256") == digest else "belongs to other weights"


def export(checkpoint: str | Path, folder: str | Path) -> Scores:
    """Write the exported form of a checkpoint, with the metrics.json of its weights if there is one."""
    checkpoint, folder = Path(checkpoint), Path(folder)
    state = read_checkpoint(checkpoint)
    scores = find_scores(checkpoint, state)
    write_folder(folder, state)
    if scores.metrics is not None:
        write_json(folder / METRICS, scores.metrics)
    elif folder.absolute() != checkpoint.absolute():
        (folder / METRICS).unlink(missing_ok=True)  # scores of another checkpoint that was exported to this folder
    return scores


def export_vlm(checkpoint: str | Path, folder: Path, form: Form, base: str | Path | None = None) -> None:
    """Write a fine-tuned model for transformers.

    Args:
        checkpoint: of METHOD=vlm. base: see `loading.load`.
        folder: to write.
        form: "peft": LoRA's matrices for `PeftModel.from_pretrained`. "merged": a base model's folder, which transformers and diffcap
            load like the original; the prompt is in README.md.
    """
    from diffcap.methods.vlm.model import VLM

    loaded = load(checkpoint, base)
    captioner: Any = loaded.captioner
    if not isinstance(captioner, VLM):
        raise DiffcapError(f"{checkpoint}: --form {form} is for METHOD=vlm; omit --form.")
    has_lora = hasattr(captioner.net, "peft_config")
    if form == "peft" and not has_lora:
        raise DiffcapError(
            f"{checkpoint}: was not trained with LoRA, so it has no adapter; use --form merged, or omit --form."
        )
    if captioner.difference is not None:
        raise DiffcapError(
            f"{checkpoint}: has a difference module, which transformers does not know; omit --form for diffcap's own form."
        )
    if captioner.hyperparameters["four_bit"] and form == "merged":
        raise DiffcapError(
            f"{checkpoint}: its base model was loaded in 4 bits, into which LoRA cannot be merged without loss; use --form peft."
        )
    if form == "peft":
        captioner.net.save_pretrained(folder)
        return
    model = captioner.net.merge_and_unload() if has_lora else captioner.net
    model.save_pretrained(folder)
    captioner.processor.save_pretrained(folder)
    (folder / "README.md").write_text(_merged_card(captioner, loaded.metadata), encoding="utf-8")


def _merged_card(captioner: Any, metadata: dict[str, Any]) -> str:
    """The README.md of a merged model, with the licence of its base model, which diffcap and the Hub read there."""
    from huggingface_hub import ModelCardData

    arguments, licence = captioner.hyperparameters, captioner.licence
    is_identifier = licence is not None and re.fullmatch(r"[a-z0-9.-]+", licence) is not None
    card = ModelCardData(
        license=licence if is_identifier else "other",
        license_name=None if is_identifier else licence,
        base_model=arguments["base"] if arguments["revision"] else None,
        tags=["image-difference-captioning", "change-captioning"],
    )
    name = arguments["base"] if arguments["revision"] else Path(arguments["base"]).name
    commit = f" at commit {arguments['revision']}" if arguments["revision"] else ""
    prompt = " ".join(arguments["prompt"].split())
    return (
        f"---\n{card.to_yaml()}\n---\n\n# {name}, fine-tuned\n\n{name}{commit}, fine-tuned on `{metadata['dataset']}` with diffcap "
        f"{metadata['version']} to describe in one sentence what changed between two images. The trained weights are merged into "
        "the model.\n\n"
        f'* Prompt, after the two images: "{prompt}"\n'
        f"* Licence of the base model: {licence or 'not stated'}. Its terms and those of the dataset limit the use of these weights.\n"
    )
