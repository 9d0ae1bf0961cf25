"""Manners towards servers: pauses that they ask for hold for every worker, and one that is down is left alone."""

import random
import threading
import time
from email.utils import parsedate_to_datetime
from urllib.parse import urlsplit

import requests

_DOWN = 4  # files in a row that a host did not deliver, each after all its retries
_LONGEST = 30.0  # seconds between two tries, unless the server asks for more


class Stopped(Exception):
    """Fetching was given up while waiting."""


class Hosts:
    """What is known of each host during one run; safe to use from several threads."""

    def __init__(self, backoff: float):
        """`backoff`: seconds before the first new try."""
        self.backoff, self.stop = backoff, threading.Event()  # set when everything is to end
        self._lock = threading.Lock()
        self._until: dict[str, float] = {}
        self._failures: dict[str, int] = {}
        self._own = threading.local()

    def session(self) -> requests.Session:
        """The calling thread's connections, kept open from one file to the next."""
        if not hasattr(self._own, "session"):
            self._own.session = requests.Session()
        session: requests.Session = self._own.session
        return session

    def down(self, url: str) -> bool:
        """Whether the host of `url` failed so often in a row that asking on is no use."""
        return self._failures.get(host_of(url), 0) >= _DOWN

    def delivered(self, url: str) -> None:
        """A file came, or a clear answer that there is none."""
        with self._lock:
            self._failures[host_of(url)] = 0

    def failed(self, url: str) -> None:
        """A file did not come, after all retries."""
        with self._lock:
            host = host_of(url)
            self._failures[host] = self._failures.get(host, 0) + 1

    def pause(self, url: str, seconds: float) -> None:
        """Nobody asks this host for so long: it said so."""
        with self._lock:
            host = host_of(url)
            self._until[host] = max(self._until.get(host, 0.0), time.monotonic() + seconds)

    def wait(self, url: str, tries: int = 0) -> None:
        """Sleep until the host may be asked, the longer the more `tries` failed.

        Raises:
            Stopped: everything ended meanwhile.
        """
        grown = min(_LONGEST, self.backoff * 2 ** (tries - 1)) * random.uniform(0.5, 1.0) if tries else 0.0
        due = time.monotonic() + grown
        while (left := max(due, self._until.get(host_of(url), 0.0)) - time.monotonic()) > 0:
            if self.stop.wait(left):
                break
        if self.stop.is_set():
            raise Stopped


def host_of(url: str) -> str:
    """The host that an address names; of one that is malformed, the address."""
    try:
        return urlsplit(url).netloc
    except ValueError:
        return url


def retry_after(header: str | None) -> float | None:
    """Seconds that a Retry-After header asks for, given in seconds or as a date; None where it says nothing usable."""
    if header is None:
        return None
    try:
        return max(0.0, float(header))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(header).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return None
