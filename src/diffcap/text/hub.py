"""Use the tokenizer and the chat template of a vision-language model as a vocabulary of captions."""

import hashlib
import json
import re
import sys
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from diffcap.text.characters import join_characters
from diffcap.utils.errors import DiffcapError, wrap_errors

_ANSWER_MARK = "ANSWER"  # placeholder of the answer in a chat template
_NOT_AFTER_ABBREVIATION = r"(?<!\bMr\.)(?<!\bMs\.)(?<!\bDr\.)(?<!\bSt\.)(?<!\bvs\.)(?<!\bMrs\.)"
_NEGATIONS = r"\b(?:no|not|nothing|none|same|identical|unchanged)\b"
_INTRODUCTIONS = r"(?:sure|certainly|of course|okay|ok)"
_QUOTES = "\"'\u201c\u201d\u2018\u2019"


class ChatTemplate(NamedTuple):
    """The text and ids that a model's chat template adds around the answer to a question about two images."""

    prompt: str  # the text up to the answer, with the placeholders of both images
    bos_id: int  # last id of the prompt, after which the answer's first token is predicted
    eos_id: int  # first id after the answer
    lead: str  # text between the prompt and the answer, which the model predicts too (SmolVLM: a space)


def read_chat_template(processor: Any, question: str) -> ChatTemplate:
    """Find the ids around an answer by rendering the chat template of a processor with a question about two images."""
    special_tokens = [str(token) for token in processor.tokenizer.added_tokens_decoder.values() if token.special]
    if tokens_in_question := [token for token in special_tokens if token in question]:
        raise DiffcapError(
            f"the prompt has {tokens_in_question[0]!r}, which is a special token of the model; remove it from --prompt or "
            "model.captioner.init_args.prompt."
        )
    user = [{"role": "user", "content": [{"type": "image"}, {"type": "image"}, {"type": "text", "text": question}]}]
    answer = [{"role": "assistant", "content": [{"type": "text", "text": _ANSWER_MARK}]}]
    model_name = getattr(processor.tokenizer, "name_or_path", "the model")
    with wrap_errors(model_name, "no usable chat template", "use an instruction-tuned model"):
        prompt = processor.apply_chat_template(user, add_generation_prompt=True, tokenize=False)
        dialogue = processor.apply_chat_template(user + answer, tokenize=False)
    lead, separator, tail = dialogue.removeprefix(prompt).partition(_ANSWER_MARK)
    if not dialogue.startswith(prompt) or not separator:
        raise DiffcapError(
            f"{model_name}: its chat template adds text to an answer, such as a thinking block; use a variant of the model that adds none."
        )
    prompt_ids = processor.tokenizer(prompt, add_special_tokens=False)["input_ids"]
    tail_ids = processor.tokenizer(tail, add_special_tokens=False)["input_ids"]
    return ChatTemplate(prompt, prompt_ids[-1], tail_ids[0], lead)


class HubVocabulary:
    """The vocabulary of a vision-language model's tokenizer, with the same methods as `Vocabulary`, the vocabulary of words.

    `num_sentences` is for models that were not fine-tuned: `decode` returns at most so many sentences of their answer (`clean_answer`).
    """

    def __init__(self, tokenizer: Any, template: ChatTemplate, num_sentences: int | None = None) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.num_sentences = num_sentences
        self.words: list[str] = []  # empty, because the tokens come with the base model
        self.layout = "hub"  # name of this kind of vocabulary in settings and checkpoints
        tokens = json.dumps([sorted(tokenizer.get_vocab().items()), template.bos_id, template.eos_id])
        # A captioner accepts vocabularies of one family only.
        self.family = f"hub-{hashlib.sha256(tokens.encode()).hexdigest()[:12]}"
        self.bos, self.eos = template.bos_id, template.eos_id
        pad = tokenizer.pad_token_id
        self.pad = pad if pad is not None and pad != self.eos else int(self.eos == 0)  # an id other than eos
        self.unk, self.mask = None, None

    def __len__(self) -> int:
        return len(self.tokenizer)

    def encode(self, caption: str | Sequence[str], max_length: int) -> list[int]:
        """Turn a caption into at most `max_length` ids: bos, tokens, eos. Further tokens are cut off, and no padding is added."""
        text = join_characters(caption if isinstance(caption, str) else " ".join(caption))
        ids = self.tokenizer(self.template.lead + text, add_special_tokens=False)["input_ids"]
        return [self.bos, *ids[: max_length - 2], self.eos]

    def decode(self, ids: Iterable[int]) -> str:
        """Turn ids that begin with bos into text up to the first eos after bos, with single spaces."""
        text = self._decode_text(ids)
        return clean_answer(text, self.num_sentences) if self.num_sentences else " ".join(text.split())

    def decode_plain(self, ids: Iterable[int]) -> str:
        """Decode without `clean_answer`, so that each further id only adds text at the end. This shows which text belongs to which id."""
        return " ".join(self._decode_text(ids).split())

    def _decode_text(self, ids: Iterable[int]) -> str:
        token_ids = [int(token_id) for token_id in ids][1:]
        if self.eos in token_ids:
            token_ids = token_ids[: token_ids.index(self.eos)]
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))


def clean_answer(text: str, num_sentences: int = 1) -> str:
    """Return the first sentences of a model's free answer, without markup, list marks, quotation marks, labels or the final period.

    A block <think>...</think>, introductions such as "Sure!" and a sentence "Yes." at the beginning are removed. "No." is removed if the
    next sentence has a negation; else both count as one sentence. Headings and lines that end with a colon are left out if there is another
    line.

    Example:
        >>> clean_answer('Here is the change:\\n1. **Answer:** "The red cube is gone." It was on the left.')
        'The red cube is gone'
    """
    text = re.sub(r"\*+|`+|(?<!\w)_+|_+(?!\w)", "", cut_thinking(text))
    lines = [line.strip() for line in text.splitlines() if line.strip(f"-\u2022 {_QUOTES}")]
    content = [line for line in lines if not line.startswith("#") and not line.endswith(":")] or lines[-1:] or [""]
    line = re.sub(r"^(?:#+\s*|[-\u2022]\s*|\d+[.)]\s+)+", "", content[0]).lstrip(f" {_QUOTES}")
    line = re.sub(r"^(answer|caption|changes?|difference|response)\s*:\s*", "", line, flags=re.IGNORECASE)
    line = re.sub(rf"^{_INTRODUCTIONS}[!,.]\s+(?=\S)", "", line.strip(f" {_QUOTES}"), flags=re.IGNORECASE)
    sentence_gap = rf"{_NOT_AFTER_ABBREVIATION}(?<=[.!?])[{_QUOTES}]?\s+(?=[{_QUOTES}]?[A-Z])"
    sentences = re.split(sentence_gap, line.strip(f" {_QUOTES}"))
    # "Yes." or "No." answers a prompt that asks whether something changed.
    if len(sentences) > 1 and re.fullmatch(r"(yes|no)\W*", sentences[0], re.IGNORECASE):
        is_repeated = sentences[0].lower().startswith("y") or re.search(_NEGATIONS, sentences[1], re.IGNORECASE)
        sentences = sentences[1:] if is_repeated else [" ".join(sentences[:2]), *sentences[2:]]
    return " ".join(" ".join(sentences[:num_sentences]).strip(f" .!:{_QUOTES}").split())


def cut_thinking(text: str) -> str:
    """Remove the block <think>...</think> before an answer. Its first tag may be a part of the prompt; without the last, all is removed."""
    return re.sub(r"^\s*<think>.*", "", text.rpartition("</think>")[2], flags=re.DOTALL)


def import_transformers() -> Any:
    """Import the package transformers, which is optional."""
    missing = [name for name in ("transformers", "peft", "accelerate", "num2words") if find_spec(name) is None]
    if missing:
        raise DiffcapError(
            f"vision-language models need {', '.join(missing)}; install the packages with `pip install 'diffcap[vlm]'`."
        )
    import transformers

    transformers.logging.set_verbosity_error()
    if not sys.stderr.isatty():
        transformers.logging.disable_progress_bar()
    return transformers


def load_processor(folder: Path) -> Any:
    """Load the processor (tokenizer and image preprocessing) in a base model's folder; no code in the folder is run."""
    transformers = import_transformers()
    with wrap_errors(
        folder, "its processor cannot be loaded", "download the model's files again, or use another model"
    ):
        processor = transformers.AutoProcessor.from_pretrained(folder, trust_remote_code=False)
        processor.tokenizer.padding_side = "left"
    return processor
