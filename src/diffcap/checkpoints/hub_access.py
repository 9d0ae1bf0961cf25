"""Names of repositories on the Hugging Face Hub, the connection to it, and the errors of its client as sentences."""

import os
import re
import socket
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from diffcap.utils.errors import DiffcapError

CONNECT_SECONDS = 3.0  # HF_HUB_ETAG_TIMEOUT replaces it


def is_name(text: str) -> bool:
    """Whether a text has the form of a repository's name on the Hub, user/name."""
    return re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", text, re.ASCII) is not None


def check_name(name: str) -> None:
    """Refuse a text that has not this form."""
    if not is_name(name):
        raise DiffcapError(f"{name!r}: not the name of a repository on the Hub; write user/name.")


def check_connection(sources: Sequence[str | None], shipped: bool = False) -> None:
    """Check that the Hub can be reached, if one of the checkpoints and base models is a name on it that is not in the cache.

    PyTorch, whose import takes seconds, is not needed. `shipped`: whether the message names the captioners that ship.
    """
    for source in sources:
        name, _, revision = (source or "").partition("@")
        if not is_name(name) or name.endswith(".ckpt") or Path(str(source)).exists() or not (fault := offline_reason()):
            continue
        from huggingface_hub import try_to_load_from_cache

        if not isinstance(try_to_load_from_cache(name, "config.json", revision=revision or None), str):
            also = ", or `blocks` or `tiles`, which ship with diffcap and know rendered images only" if shipped else ""
            raise DiffcapError(f"{_offline_message(name, fault)}{also}.")


def offline_reason() -> str | None:
    """Why the Hub cannot be used; None if a connection to it (HF_ENDPOINT) opens. Each process tries that once."""
    from huggingface_hub import constants

    return "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else _connection_fault(constants.ENDPOINT)


@cache
def _connection_fault(url: str) -> str | None:
    """Connect to a server, or to the proxy that the environment names for it; returns the reason if that fails."""
    from huggingface_hub import constants

    server = urlsplit(url)
    proxies = getproxies()
    proxy = proxies.get(server.scheme) or proxies.get("all")
    if proxy and not proxy_bypass(server.netloc):
        server = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    port = server.port or {"http": 80, "https": 443}.get(server.scheme, 1080)
    seconds = constants.HF_HUB_ETAG_TIMEOUT if os.environ.get("HF_HUB_ETAG_TIMEOUT") else CONNECT_SECONDS
    end = time.monotonic() + seconds
    answers: SimpleQueue[Any] = SimpleQueue()

    def start(function: Callable[..., Any], *arguments: Any) -> None:
        """Run a function in a thread, because the resolver of names takes no timeout."""

        def run() -> None:
            try:
                answers.put(function(*arguments))
            except (OSError, UnicodeError) as error:  # UnicodeError: not a host name
                answers.put(error)

        threading.Thread(target=run, daemon=True).start()

    def answer() -> Any:
        return answers.get(timeout=max(0.0, end - time.monotonic()))

    def connect(address: tuple[Any, ...]) -> None:
        socket.create_connection(address[:2], seconds).close()

    try:
        start(socket.getaddrinfo, server.hostname, port, 0, socket.SOCK_STREAM)
        fault = found = answer()
        if isinstance(found, list):
            for *_, address in found:  # all at once, because IPv6 may be broken where IPv4 works
                start(connect, address)
            for _ in found:
                if (fault := answer()) is None:
                    return None
        reason = getattr(fault, "strerror", None) or fault
    except Empty:
        reason = f"no answer within {seconds:g} seconds; HF_HUB_ETAG_TIMEOUT=30 waits longer"
    return f"{server.hostname} cannot be reached ({reason})"


def _offline_message(name: str, reason: str) -> str:
    return (
        f"{name}: {reason}, and the model is not in the cache of this machine; without a network, give the folder of a model that was "
        f"downloaded elsewhere with `hf download {name} --local-dir FOLDER`, or of a captioner of your own"
    )


@contextmanager
def without_requests(reason: str | None) -> Iterator[None]:
    """Let the Hub's client use its cache only, if there is a reason; it retries each request for half a minute otherwise."""
    from huggingface_hub import constants

    was_offline = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = was_offline or reason is not None
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = was_offline


@contextmanager
def hub_errors(name: str) -> Iterator[None]:
    """Turn any error of the Hub's client into a `DiffcapError`; hide progress bars if stderr is not a terminal."""
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RevisionNotFoundError
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    reason = offline_reason()
    try:
        with without_requests(reason):
            yield
    except DiffcapError:
        raise
    except Exception as error:  # the exceptions depend on the HTTP library of the client's version
        # The client hides a status behind "not in the cache".
        refusal = error if hasattr(error, "response") else error.__cause__
        status = getattr(getattr(refusal, "response", None), "status_code", None)
        if isinstance(refusal, GatedRepoError):
            message = (
                f"{name}: the Hub gives this repository only to those who accepted its licence ({status}); accept it on "
                f"https://huggingface.co/{name} and log in with `hf auth login`, or set HF_TOKEN"
            )
        elif status in (401, 403) and isinstance(refusal, HfHubHTTPError):
            message = (
                f"{name}: the Hub refuses access ({status}); log in with `hf auth login`, or set HF_TOKEN to a token with "
                "permission for this repository (write permission to upload), check the name, and accept the licence on "
                f"https://huggingface.co/{name} if it asks for that"
            )
        elif isinstance(refusal, RevisionNotFoundError):
            message = (
                f"{name}: the Hub has no such revision of this repository; check the revision (a branch, tag or commit), or "
                "omit it for the current one"
            )
        elif status == 404:
            message = f"{name}: the Hub has no repository of this name; check the name"
        elif reason:
            message = _offline_message(name, reason)
        else:
            text = textwrap.shorten(str(error).partition("\n")[0].rstrip(". "), 200, placeholder=" ...")
            message = f"{name}: the request to the Hub failed ({text}); check the network and HF_ENDPOINT"
        raise DiffcapError(f"{message}.") from None
