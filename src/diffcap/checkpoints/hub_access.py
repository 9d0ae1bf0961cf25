"""Names of repositories on the Hugging Face Hub, and the errors of its client as sentences."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from diffcap.utils.errors import DiffcapError


def is_name(text: str) -> bool:
    """Whether a text has the form of a repository's name on the Hub, user/name."""
    return re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", text, re.ASCII) is not None


def check_name(name: str) -> None:
    """Check the form of a repository's name.

    Raises:
        DiffcapError: it is not user/name.
    """
    if not is_name(name):
        raise DiffcapError(f"{name!r}: not the name of a repository on the Hub; write user/name.")


@contextmanager
def hub_errors(name: str) -> Iterator[None]:
    """Turn any error of the Hub's client into a `DiffcapError`; hide progress bars if stderr is not a terminal."""
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RevisionNotFoundError
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        yield
    except DiffcapError:
        raise
    except Exception as error:  # the exceptions depend on the HTTP library of the client's version
        # The client hides a status behind "not in the cache".
        refusal = error if hasattr(error, "response") else error.__cause__
        status = getattr(getattr(refusal, "response", None), "status_code", None)
        reason = " ".join(str(error).split())[:160].rstrip(". ")
        if isinstance(refusal, GatedRepoError):
            raise DiffcapError(
                f"{name}: the Hub gives this repository only to those who accepted its licence ({status}); accept it on "
                f"https://huggingface.co/{name} and log in with `hf auth login`, or set HF_TOKEN."
            ) from None
        if status in (401, 403) and isinstance(refusal, HfHubHTTPError):
            raise DiffcapError(
                f"{name}: the Hub refuses access ({status}); log in with `hf auth login`, or set HF_TOKEN to a token with "
                "permission for this repository (write permission to upload), check the name, and accept the licence on "
                f"https://huggingface.co/{name} if it asks for that."
            ) from None
        if isinstance(refusal, RevisionNotFoundError):
            raise DiffcapError(
                f"{name}: the Hub has no such revision of this repository; check the revision (a branch, tag or commit), or "
                "omit it for the current one."
            ) from None
        if status == 404:
            raise DiffcapError(f"{name}: the Hub has no repository of this name; check the name.") from None
        raise DiffcapError(
            f"{name}: the request to the Hub failed ({reason}); check the network and HF_ENDPOINT."
        ) from None
