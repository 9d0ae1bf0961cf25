"""Options of fetching; a light module, since `--help` imports it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class FetchSettings:
    """How files are fetched where a dataset's folder is not given.

    Attributes:
        sources: YAML file that says where the dataset's files are; configs/sources/<dataset>.yaml by default.
        jobs: how many files to fetch at a time.
        retries: how often to try again, with growing pauses, while a file gets no further.
        timeout: seconds without a byte (or with less than a kilobyte) after which a connection counts as dead.
        backoff: seconds before the first new try; each further one waits twice as long, half a minute at most.
        patience: the longest pause, in seconds, that a server may ask for; one that asks for more is left for later.
    """

    sources: str | None = None
    jobs: int = 4
    retries: int = 5
    timeout: float = 60.0
    backoff: float = 1.0
    patience: float = 300.0
