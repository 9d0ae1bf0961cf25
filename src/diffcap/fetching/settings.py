"""Options of fetching; imports nothing heavy, because `--help` imports this module."""

from dataclasses import dataclass


@dataclass(frozen=True)
class FetchSettings:
    """How files are fetched where a dataset's folder is not given.

    Attributes:
        sources: YAML file that says where the dataset's files are; configs/sources/<dataset>.yaml by default.
        jobs: number of simultaneous downloads.
        retries: how many times to try again, with growing pauses, while a download makes no progress.
        timeout: seconds without a byte after which a connection counts as dead.
        backoff: the n-th retry waits about backoff * 2^(n - 1) seconds, at most 30.
        patience: longest pause in seconds that a server may request (Retry-After); the file fails if it requests more.
    """

    sources: str | None = None
    jobs: int = 4
    retries: int = 5
    timeout: float = 60.0
    backoff: float = 1.0
    patience: float = 300.0
