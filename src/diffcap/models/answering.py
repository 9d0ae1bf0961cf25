"""Models that only answer a question about two images in text: they have no probabilities, beams, attention maps or training."""

import base64
import io
import os
import re
import time
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple
from urllib.parse import urlsplit

from PIL.Image import Image
from torch import nn

from diffcap.models.captioner import constructor_arguments
from diffcap.record import digest
from diffcap.text.hub import clean_answer, cut_thinking
from diffcap.utils.errors import DiffcapError, printable, wrap_errors
from diffcap.utils.files import SERVED

KEY = "OPENAI_API_KEY"  # environment variable
RETRY_SECONDS = (5.0, 20.0, 60.0)  # before more requests, after a status of 429 or JSON that was cut
REMEDIES = {  # after these statuses, all requests would fail
    401: f"set {KEY} to a valid key",
    403: f"set {KEY} to a key with access to the model",
    404: "correct the model's name or the address, which often ends in /v1",
    429: "use a smaller --batch_size, or run the same command later",
}


class Answer(NamedTuple):
    """An answer of a model to a question."""

    text: str
    prompt_tokens: int  # with those of the images; 0 if the server does not count them
    answer_tokens: int  # with those of its reasoning
    seconds: float
    is_cut: bool  # True if it ended at the maximum number of tokens


class Unreachable(DiffcapError):
    """The server would refuse or miss all further requests, too."""


class AnsweringModel(nn.Module):
    """The interface. The arguments are all that an answer depends on; a caption is its first `sentences` sentences."""

    calls_server: ClassVar[bool] = False  # True: several threads ask at the same time
    licence: str | None = None

    def __init__(
        self, base: str, revision: str | None, prompt: str, sentences: int, max_length: int, base_sha256: str
    ) -> None:
        super().__init__()
        self.hyperparameters = constructor_arguments(locals())

    def answer(self, pairs: Sequence[tuple[Image, Image]]) -> list[Answer]:
        """Answer `prompt` about RGB images with at most `max_length` tokens."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise a DiffcapError if the model cannot compare two images."""


class ServedModel(AnsweringModel):
    """A model behind a server with OpenAI's chat API, such as vLLM or Ollama. The key, OPENAI_API_KEY, is never written.

    `source` is "openai:MODEL@http://HOST:PORT/v1", split at the last "@http". The tokens of `max_length` include reasoning.
    """

    calls_server = True

    def __init__(self, source: str, prompt: str, sentences: int = 1, max_length: int = 1024) -> None:
        self.name, _, address = source.rpartition("@http")
        self.address = f"http{address}"
        with wrap_errors(source, "not a served model", f"write {SERVED}MODEL@http://127.0.0.1:8000/v1"):
            host, _ = urlsplit(self.address).hostname, urlsplit(self.address).port
            if not (self.name.removeprefix(SERVED) and host):
                raise ValueError("its name or address is missing")
        try:
            from openai import DefaultHttpxClient, OpenAI
        except ModuleNotFoundError:
            raise DiffcapError(f"{self.name}: needs openai; run: pip install 'diffcap[api]'.") from None
        is_local = re.fullmatch(r"localhost|127(\.\d+){3}|::1", host) is not None
        self.key = os.environ.get(KEY, "").strip() or ("none" if is_local else "")
        if not (self.key and self.key.isascii() and self.key.isprintable()):
            raise DiffcapError(
                f"{self.address}: needs a key; set {KEY} to it (ASCII only), or to any text if it has none."
            )
        super().__init__(self.name, None, prompt, sentences, max_length, digest(self.name, prompt, max_length))
        client = DefaultHttpxClient(trust_env=not is_local)  # no proxy for this machine
        # The client retries after a status of 429, 500 and more, a broken connection or a timeout (in seconds).
        self.client = OpenAI(api_key=self.key, base_url=self.address, http_client=client, max_retries=2, timeout=300.0)
        self.options: dict[str, Any] = {"max_tokens": max_length, "temperature": 0}

    def answer(self, pairs: Sequence[tuple[Image, Image]]) -> list[Answer]:
        """Answer the question about each pair, one request after the other. A failed request raises a DiffcapError."""
        return [self.ask([*images, self.hyperparameters["prompt"]]) for images in pairs]

    def ask(self, parts: Sequence[Image | str]) -> Answer:
        """Send one message of images and texts; return the answer without its reasoning. An error is `Unreachable` or of this request."""
        start = time.monotonic()
        response = self._request([{"role": "user", "content": list(map(_content, parts))}])
        if isinstance(response, str):
            raise Unreachable(f"{self.address}: not OpenAI's chat API; correct the address, which often ends in /v1.")
        with wrap_errors(self.name, "the server's answer is not a chat completion", "see its log"):
            choice, usage = (response.choices or [])[0], response.usage
            text = cut_thinking(choice.message.content or "").strip()
            counts = [int(getattr(usage, name, 0) or 0) for name in ("prompt_tokens", "completion_tokens")]
            is_cut = choice.finish_reason == "length"
        if not clean_answer(text, self.hyperparameters["sentences"]):  # such as punctuation only
            cause = " (all its tokens were reasoning)" if is_cut and not text else ""
            raise DiffcapError(f"{self.name}: the answer is empty{cause}; use another model or prompt.")
        return Answer(text, counts[0], counts[1], time.monotonic() - start, is_cut)

    def _request(self, messages: Any) -> Any:
        import openai

        model = self.name.removeprefix(SERVED)
        pauses = iter(RETRY_SECONDS)
        while True:
            options = self.options
            try:
                return self.client.chat.completions.create(model=model, messages=messages, **options)
            except (openai.OpenAIError, ValueError) as error:  # ValueError: the JSON was cut
                status = getattr(error, "status_code", None)
                body = error.response.text if isinstance(error, openai.APIStatusError) else ""
                if status == 400 and "max_completion_tokens" in body and "max_tokens" in options:
                    # Reasoning models of OpenAI have another name for the limit, and accept no temperature.
                    self.options = {"max_completion_tokens": options["max_tokens"]}
                    continue
                if status == 400 and "temperature" in body and "temperature" in options:
                    self.options = {"max_tokens": options["max_tokens"]}
                    continue
                if (status == 429 or isinstance(error, ValueError)) and (pause := next(pauses, None)) is not None:
                    time.sleep(pause)
                    continue
                text = f"{status}: {body}" if status else str(error.__cause__ or error)
                text = text if self.key == "none" else text.replace(self.key, "***")  # some servers repeat the key
                reason = printable(" ".join(text.split()))[:200].rstrip(". ")
                if status in REMEDIES:
                    raise Unreachable(f"{self.name}: refused ({reason}); {REMEDIES[status]}.") from None
                if isinstance(error, openai.APIConnectionError) and not isinstance(error, openai.APITimeoutError):
                    raise Unreachable(f"{self.address}: cannot be reached ({reason}); start the server.") from None
                raise DiffcapError(f"{self.name}: no answer ({reason}); see the server's log.") from None


def _content(part: Image | str) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    file = io.BytesIO()
    part.save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}
