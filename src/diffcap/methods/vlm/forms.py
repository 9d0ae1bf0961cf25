"""Load a vision-language model as a captioner without training it, and export a fine-tuned model for transformers."""

import re
from pathlib import Path
from typing import Any, Literal

import torch

import diffcap
from diffcap.checkpoints.base_models import MODEL_TYPES, ZERO_SHOT, find_base
from diffcap.checkpoints.loading import Checkpoint, load
from diffcap.checkpoints.reading import FORMAT
from diffcap.methods.vlm.generic import GenericVLM
from diffcap.methods.vlm.model import PROMPT, VLM
from diffcap.models.answering import ServedModel
from diffcap.records import SPLITS, read_dataset, write_json
from diffcap.utils.errors import DiffcapError
from diffcap.utils.files import served_name

MAX_LENGTH, SERVED_MAX_LENGTH = 64, 1024  # tokens of an answer
# Longest side of an image in pixels. Qwen2.5-VL makes 567 tokens of 768 x 576 pixels; its limit is 16,384 tokens.
LONGEST_SIDE = 768


def zero_shot(
    source: str | Path, prompt: str | None = None, sentences: int = 1, max_length: int | None = None
) -> Checkpoint:
    """Load the captioner of a base model, from a folder or `user/name@revision` on the Hub, or of a served model.

    Weights are bfloat16 on CUDA, else float32. An answer is cut after `max_length` tokens, by default 64, or 1,024 of a served model, which
    may reason first. The caption is its first `sentences` sentences.
    """
    base, prompt = str(source), prompt or PROMPT
    dtype: Literal["float32", "bfloat16"] = "bfloat16" if torch.cuda.is_available() else "float32"
    captioner: Any
    if served_name(base):
        captioner = ServedModel(base, prompt, sentences, max_length or SERVED_MAX_LENGTH)
    elif find_base(base, any_type=True).model_type in MODEL_TYPES:
        captioner = VLM(base, prompt=prompt, train="nothing", sentences=sentences, dtype=dtype)
    else:
        captioner = GenericVLM(base, prompt, sentences, max_length or MAX_LENGTH, dtype)
    features = {
        "name": None,  # every feature store (a dataset's stored images or features) with pixels is suitable
        "dtype": "uint8",
        "library": "pixels",
        "preprocessing": {"longest_side": LONGEST_SIDE},
        **dict.fromkeys(("shape", "network", "stage", "pool")),
    }
    metadata = {
        "format": FORMAT,
        "version": diffcap.__version__,
        "stage": ZERO_SHOT,
        "method": "vlm",
        **{name: captioner.hyperparameters[name] for name in ("base", "revision", "prompt")},
        "licence": captioner.licence,
        **dict.fromkeys(("dataset", "seed")),
        "tokenizer": "ptb",  # of evaluation: Penn Treebank
        "step": 0,
    }
    vocabulary: Any = getattr(captioner, "vocabulary", None)  # None: the model only answers with text
    return Checkpoint(captioner.eval(), vocabulary, max_length or MAX_LENGTH, features, metadata)


def export(
    checkpoint: str | Path, folder: Path, form: Literal["peft", "merged"], base: str | Path | None = None
) -> None:
    """Write a fine-tuned model for transformers. The form "peft" has LoRA's matrices for `PeftModel.from_pretrained`.

    The form "merged" is a folder that transformers and diffcap load like the base model's; its README.md has the prompt. `base` is the
    folder or name of the base model; None: the one that the checkpoint names.
    """
    loaded_checkpoint = load(checkpoint, base)
    captioner: Any = loaded_checkpoint.captioner
    if not isinstance(captioner, VLM):
        raise DiffcapError(f"{checkpoint}: --form {form} is for METHOD=vlm ({', '.join(MODEL_TYPES)}); omit --form.")
    has_lora = hasattr(captioner.net, "peft_config")
    fault = None
    if form == "peft" and not has_lora:
        fault = "was not trained with LoRA, so it has no adapter; use --form merged, or omit --form"
    elif captioner.difference is not None:
        fault = "has a difference module, which transformers does not have; omit --form for diffcap's own form"
    elif captioner.hyperparameters["four_bit"] and form == "merged":
        fault = "its base model was loaded in 4 bits, into which LoRA cannot be merged without loss; use --form peft"
    if fault:
        raise DiffcapError(f"{checkpoint}: {fault}.")
    if form == "peft":
        captioner.net.save_pretrained(folder)
        return
    model = captioner.net.merge_and_unload() if has_lora else captioner.net
    model.save_pretrained(folder)
    captioner.processor.save_pretrained(folder)
    from huggingface_hub import ModelCard, ModelCardData

    # diffcap and the Hub read the licence of the base model in the README.md of the merged model.
    arguments, licence, metadata = captioner.hyperparameters, captioner.licence, loaded_checkpoint.metadata
    name = arguments["base"] if arguments["revision"] else Path(arguments["base"]).name
    is_hub_name = licence is not None and re.fullmatch(r"[a-z0-9.-]+", licence) is not None  # such as apache-2.0
    card_data = ModelCardData(
        license=licence if is_hub_name else "other",
        license_name=None if is_hub_name else licence,
        base_model=name if arguments["revision"] else None,
        tags=["image-difference-captioning", "change-captioning"],
    )
    values: dict[str, Any] = {"name": name, "arguments": arguments, "licence": licence, "metadata": metadata}
    card = ModelCard.from_template(card_data, str(Path(__file__).with_name("merged_card.md.j2")), **values)
    (folder / "README.md").write_text(f"{card}\n", encoding="utf-8")


def export_messages(dataset_folder: str | Path, folder: Path) -> None:
    """Write the captions of a dataset as messages for LLaMA-Factory and ms-swift: a JSON list for each split, and dataset_info.json.

    Paths of images are relative to the dataset's images. `dataset_folder` has the manifest of the data stage.
    """
    dataset = read_dataset(dataset_folder)
    entries = {}
    for split in SPLITS:
        rows = [
            {
                "messages": [
                    {"role": "user", "content": f"<image><image>{PROMPT}"},
                    {"role": "assistant", "content": caption},
                ],
                "images": list(pair.images),
            }
            for pair in dataset.pairs
            if pair.split == split
            for caption in pair.captions
        ]
        if rows:
            write_json(folder / f"{split}.json", rows)
            columns = {"messages": "messages", "images": "images"}
            tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
            entry = {"file_name": f"{split}.json", "formatting": "sharegpt", "columns": columns, "tags": tags}
            entries[f"{dataset.name}_{split}"] = entry
    write_json(folder / "dataset_info.json", entries)
