"""Names of repositories on the Hugging Face Hub, the connection to the Hub, and messages for errors of its client."""

import os
import re
import socket
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, as_completed
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from diffcap.utils.errors import DiffcapError

CONNECT_SECONDS = 3.0  # the environment variable HF_HUB_ETAG_TIMEOUT, if set, replaces this value


def is_repository_name(text: str) -> bool:
    """Return True if a text has the form of a repository's name on the Hub, user/name."""
    return re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", text, re.ASCII) is not None


def check_repository_name(name: str) -> None:
    """Raise a `DiffcapError` if the text is not a repository name."""
    if not is_repository_name(name):
        raise DiffcapError(f"{name!r}: not the name of a repository on the Hub; write user/name.")


def check_connection(sources: Sequence[str | None], shipped: bool = False) -> None:
    """Raise an error if a source (a checkpoint or a base model) has to be fetched from the Hub and the Hub cannot be reached.

    This does not import PyTorch, which takes seconds. With `shipped`, the error also suggests the captioners that ship with diffcap.
    """
    for source in sources:
        name, _, revision = (source or "").partition("@")
        is_file = name.endswith(".ckpt") or Path(str(source)).exists()
        reason = offline_reason() if is_repository_name(name) and not is_file else None
        if reason is None:
            continue
        from huggingface_hub import try_to_load_from_cache

        if not isinstance(try_to_load_from_cache(name, "config.json", revision=revision or None), str):
            hint = ", or `blocks` or `tiles` of this package, which describe rendered images only" if shipped else ""
            raise DiffcapError(f"{_offline_message(name, reason)}{hint}.")


def offline_reason() -> str | None:
    """Return why the Hub at HF_ENDPOINT cannot be used; None if a connection opens. Only the first call of a process connects."""
    from huggingface_hub import constants

    return "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else _connection_failure(constants.ENDPOINT)


@cache
def _connection_failure(url: str) -> str | None:
    """Connect to a server, or to its proxy from the environment. Return why the connection fails, or None if it opens."""
    from huggingface_hub import constants

    server = urlsplit(url)
    proxies = getproxies()
    proxy = proxies.get(server.scheme) or proxies.get("all")
    if proxy and not proxy_bypass(server.netloc):
        server = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    port = server.port or {"http": 80, "https": 443}.get(server.scheme, 1080)  # 1080: SOCKS
    seconds = constants.HF_HUB_ETAG_TIMEOUT if os.environ.get("HF_HUB_ETAG_TIMEOUT") else CONNECT_SECONDS
    deadline = time.monotonic() + seconds
    failure: BaseException | None = None
    try:
        lookup = _in_thread(socket.getaddrinfo, server.hostname, port, 0, socket.SOCK_STREAM)  # without a timeout
        addresses = [address for *_, address in lookup.result(seconds)]
        # All addresses are tried at once, because IPv6 may be broken where IPv4 works.
        attempts = [_in_thread(_connect, address, seconds) for address in addresses]
        for attempt in as_completed(attempts, max(0.0, deadline - time.monotonic())):
            failure = attempt.exception()
            if failure is None:
                return None
    except TimeoutError:
        failure = TimeoutError(f"no answer within {seconds:g} seconds; HF_HUB_ETAG_TIMEOUT=30 waits longer")
    except (OSError, UnicodeError) as error:  # UnicodeError: not a host name
        failure = error
    return f"{server.hostname} cannot be reached ({getattr(failure, 'strerror', None) or failure})"


def _connect(address: tuple[Any, ...], seconds: float) -> None:
    socket.create_connection(address[:2], seconds).close()


def _in_thread(function: Callable[..., Any], *arguments: Any) -> Future[Any]:
    """Run a function in a daemon thread, which does not delay the end of the process."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function(*arguments))
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def _offline_message(name: str, reason: str) -> str:
    return (
        f"{name}: {reason}, and the model is not in the cache of this machine. Without a network, download it elsewhere with "
        f"`hf download {name} --local-dir FOLDER` and give that folder, or give a captioner of your own"
    )


@contextmanager
def use_only_hub_cache(reason: str | None) -> Iterator[None]:
    """With a `reason` not to connect, let the Hub's client use only its cache. Otherwise, it would retry for half a minute first."""
    from huggingface_hub import constants

    was_offline = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = was_offline or reason is not None
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = was_offline


@contextmanager
def hub_errors(name: str) -> Iterator[None]:
    """Turn any error of the Hub's client into a `DiffcapError`. Disable progress bars if stderr is not a terminal."""
    from huggingface_hub.errors import HfHubHTTPError, RevisionNotFoundError
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    reason = offline_reason()
    try:
        with use_only_hub_cache(reason):
            yield
    except DiffcapError:
        raise
    except Exception as error:  # versions of the client use different HTTP libraries, each with its own exceptions
        # For a file that is not in the cache, the client's error has the HTTP error as its cause.
        refusal = error if hasattr(error, "response") else error.__cause__
        status = getattr(getattr(refusal, "response", None), "status_code", None)
        if status in (401, 403) and isinstance(refusal, HfHubHTTPError):
            message = (
                f"{name}: the Hub refuses access ({status}); log in with `hf auth login`, or set HF_TOKEN to a token for this "
                "repository (with write permission to upload). Check the name. If "
                f"https://huggingface.co/{name} asks you to accept a licence, accept it"
            )
        elif isinstance(refusal, RevisionNotFoundError):
            message = (
                f"{name}: the Hub has no such revision of this repository; check the revision (a branch, tag or commit). "
                "Without a revision, the current one is used"
            )
        elif status == 404:
            message = f"{name}: the Hub has no repository of this name; check the name"
        elif reason:
            message = _offline_message(name, reason)
        else:
            text = textwrap.shorten(str(error).partition("\n")[0].rstrip(". "), 200, placeholder=" ...")
            message = f"{name}: the request to the Hub failed ({text}); check the network and HF_ENDPOINT"
        raise DiffcapError(f"{message}.") from None
