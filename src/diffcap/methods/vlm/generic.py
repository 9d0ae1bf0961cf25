"""Caption two images with a model of transformers of any family, through its own processor, chat template and `generate`."""

import time
from collections.abc import Sequence
from typing import Any

import torch
from PIL.Image import Image, linear_gradient, new

from diffcap.checkpoints.base_models import MODEL_TYPES, base_sha256, find_base
from diffcap.methods.vlm.model import load_model
from diffcap.models.answering import Answer, AnsweringModel
from diffcap.text.hub import load_processor
from diffcap.utils.errors import DiffcapError, wrap_errors

CHECK_SIZE = (112, 112)  # pixels of the images of `check`
PLACES = {"paligemma": "<image><image>"}  # in the prompts of families without a chat template


class GenericVLM(AnsweringModel):
    """A vision-language model whose family has no code in diffcap. Code of its repository is never run.

    `base` and `dtype` are those of `VLM`, and the other arguments those of `zero_shot`.
    """

    def __init__(self, base: str, prompt: str, sentences: int, max_length: int, dtype: str) -> None:
        found = find_base(base, any_type=True)
        super().__init__(found.name, found.revision, prompt, sentences, max_length, base_sha256(found.folder))
        self.licence = found.licence
        self.processor = load_processor(found.folder)
        self.has_template = bool(getattr(self.processor, "chat_template", None))
        if not self.has_template and found.model_type not in PLACES:
            raise DiffcapError(
                f"{found.name}: has no chat template, so it cannot be asked about two images; use an instruction-tuned model, such as "
                f"those of the types {', '.join(MODEL_TYPES)}."
            )
        self.text = prompt if self.has_template else PLACES[found.model_type] + prompt
        self.net: Any = load_model(found.folder, dtype, attention=None)
        self.tokenizer = self.processor.tokenizer
        self.tokenizer.pad_token = self.tokenizer.pad_token or self.tokenizer.eos_token

    @torch.inference_mode()
    def _generate(self, pairs: Sequence[tuple[Image, Image]], max_length: int, **options: Any) -> tuple[Any, Any]:
        """Return the inputs, padded on the left, and the output of greedy decoding."""
        if self.has_template:
            question = {"type": "text", "text": self.text}
            contents = ([*({"type": "image", "image": image} for image in pair), question] for pair in pairs)
            chats = [[{"role": "user", "content": content}] for content in contents]
            form = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, "enable_thinking": False}
            inputs = self.processor.apply_chat_template(chats, return_tensors="pt", padding=True, **form)
        else:
            images = [list(pair) for pair in pairs]
            inputs = self.processor(text=[self.text] * len(pairs), images=images, return_tensors="pt", padding=True)
        inputs = inputs.to(self.net.device, self.net.dtype)  # the type is for pixels only
        options |= {"max_new_tokens": max_length, "do_sample": False, "num_beams": 1}
        return inputs, self.net.generate(**inputs, pad_token_id=self.tokenizer.pad_token_id, **options)

    def answer(self, pairs: Sequence[tuple[Image, Image]]) -> list[Answer]:
        """Answer the question about all pairs in one batch."""
        start = time.monotonic()
        inputs, ids = self._generate(pairs, self.hyperparameters["max_length"])
        if not self.net.config.is_encoder_decoder:
            ids = ids[:, inputs["input_ids"].shape[1] :]
        texts = self.processor.batch_decode(ids, skip_special_tokens=True)
        prompt_counts = inputs["attention_mask"].sum(1).tolist()
        answer_counts = (ids != self.tokenizer.pad_token_id).sum(1).tolist()
        seconds = (time.monotonic() - start) / len(pairs)
        limit = self.hyperparameters["max_length"]
        end_ids = torch.tensor(self.net.generation_config.eos_token_id or -1, device=ids.device)  # an id or several
        rows = zip(texts, prompt_counts, answer_counts, torch.isin(ids[:, -1], end_ids).tolist())
        return [Answer(text, first, count, seconds, count >= limit and not ended) for text, first, count, ended in rows]

    def check(self) -> None:
        """Check with small images that an answer's first token depends on both; BLIP-2 ignores the second without an error."""
        name = self.hyperparameters["base"]
        first = linear_gradient("L").resize(CHECK_SIZE).convert("RGB")
        second, black = first.rotate(90), new("RGB", CHECK_SIZE)
        options = {"output_logits": True, "return_dict_in_generate": True}
        with wrap_errors(name, "cannot be asked about two images", "use another model or no special token in --prompt"):
            # One pair at a time: in a batch, BLIP-2 gives the second image of a pair to the next prompt.
            pairs = (first, second), (black, second), (first, black)
            expected, *others = (self._generate([pair], 1, **options)[1].logits[0] for pair in pairs)
        for logits, image in zip(others, ("first", "second")):
            if torch.allclose(logits, expected, rtol=1e-4, atol=1e-4):
                raise DiffcapError(f"{name}: its answer does not depend on the {image} image; use another model.")
