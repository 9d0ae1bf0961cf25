"""Other programs' forms of a fine-tuned vision-language model: PEFT's adapter, and the whole model with the adapter merged in."""

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
            load like the original; the prompt is not part of it.

    Raises:
        DiffcapError: the checkpoint cannot be loaded, or its model does not have this form.
    """
    captioner: Any = load(checkpoint, base).captioner
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
