"""Other programs' forms of a fine-tuned vision-language model: PEFT's adapter, and the whole model with the adapter merged in."""

import re
from pathlib import Path
from typing import Any, Literal

from diffcap.checkpoints.loading import load
from diffcap.models.vlm import VLM
from diffcap.utils.errors import DiffcapError

Form = Literal["peft", "merged"]


def export_vlm(checkpoint: str | Path, folder: Path, form: Form, base: str | Path | None = None) -> None:
    """Write a fine-tuned model for transformers.

    Args:
        checkpoint: of METHOD=vlm. base: see `loading.load`.
        folder: to write.
        form: "peft": LoRA's matrices for `PeftModel.from_pretrained`. "merged": a base model's folder, which transformers and diffcap
            load like the original; the prompt is in README.md.
    """
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


def _merged_card(captioner: VLM, metadata: dict[str, Any]) -> str:
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
