"""Photos that the annotations name by URL, one request each; those that are gone are told apart from those that failed.

A photo is gone where its server says so, and also where every address refuses it, its own with 403, while the same host
still hands out another photo of this dataset: a host that has shut us out as a whole hands out none. A web page in a photo's
place is no such word: it may be one to log in.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from diffcap.datasets.registry import get_dataset
from diffcap.errors import DiffcapError
from diffcap.fetching.checks import photo_check
from diffcap.fetching.hosts import Hosts, host_of
from diffcap.fetching.place import Failure, Place
from diffcap.fetching.settings import FetchSettings
from diffcap.fetching.sources import is_web_address
from diffcap.fetching.transfer import Refused, Unreachable, Wanted, hands_out, transfer
from diffcap.fetching.workers import in_parallel
from diffcap.progress import count_bar

Job = tuple[Path, tuple[str, ...]]
_PROBES = 3  # photos that a host has given before, asked for again to see whether it still gives any


class _Lost(NamedTuple):
    """What a photo's fetching came to; `forbidden` where it is gone if its host still hands out others."""

    failure: Failure
    forbidden: bool = False


def fetch_photos(mirrors: tuple[str, ...], place: Place, settings: FetchSettings) -> list[Failure]:
    """Fetch every photo that is not there yet; gives what failed.

    Args:
        mirrors: `https://host` of other servers that have the photos under the same paths.
        place: the dataset's folders; the module that reads the dataset has a function
            `photo_urls(folder) -> {path below the folder: addresses}`.
        settings: options of the command line.
    """
    reader = import_module(get_dataset(place.dataset).reader)
    if not hasattr(reader, "photo_urls"):
        raise DiffcapError(f"{place.dataset}: its files name no photos by address; take photos out of its sources.")
    urls: dict[str, list[str]] = reader.photo_urls(place.official)
    jobs = [(place.official / path, _addresses(own, mirrors)) for path, own in urls.items()]
    hosts, lost, before = Hosts(settings.backoff), [], sum(target.is_file() for target, _ in jobs)
    with count_bar("fetching photos", len(jobs)) as advance:
        for _, found in in_parallel(_work(place, hosts, settings), jobs, settings.jobs, hosts.stop):
            advance(1)
            if found:
                lost.append(found)
    urls_given = [url for target, _ in jobs if (url := place.ledger.url(place.name(target)))]
    failures = _settled(lost, urls_given, hosts, settings)
    there = sum(target.is_file() for target, _ in jobs)
    gone = sum(failure.gone for failure in failures)
    print(f"photos: {there:,} of {len(jobs):,} are there, {there - before:,} of them new; {gone:,} are gone for good")
    return sorted(failures, key=lambda failure: failure.name)


def _work(place: Place, hosts: Hosts, settings: FetchSettings) -> Callable[[Job], _Lost | None]:
    def work(job: Job) -> _Lost | None:
        target, urls = job
        name = place.name(target)
        check = photo_check(name, place.ledger)
        if target.is_file():
            if problem := place.present(target, check):
                return _Lost(Failure(name, urls[0] if urls else "", f"{problem}; delete it to have it fetched"))
            place.note(target, "")
            return None
        if not urls:
            return _Lost(Failure(name, "", "no web address is given for it", gone=True))
        wanted = Wanted(urls, target, None, check, known=bool(place.ledger.sha256(name)), vouched=True)
        try:
            url = transfer(wanted, hosts, settings, lambda there, total: None)
        except Unreachable as error:
            return _Lost(Failure(name, urls[0], str(error)))
        except Refused as error:
            return _Lost(Failure(name, urls[0], str(error), error.gone), error.forbidden)
        place.note(target, url)
        return None

    return work


def _settled(lost: Sequence[_Lost], given: Sequence[str], hosts: Hosts, settings: FetchSettings) -> list[Failure]:
    """The failures, those that are forbidden gone where their host still hands out photos that it gave before."""
    asked = {host_of(failure.url) for failure, forbidden in lost if forbidden}
    probes = {host: [url for url in given if host_of(url) == host][-_PROBES:] for host in asked}
    open_hosts = {host for host, urls in probes.items() if any(hands_out(url, hosts, settings) for url in urls)}
    return [
        replace(failure, gone=failure.gone or (forbidden and host_of(failure.url) in open_hosts))
        for failure, forbidden in lost
    ]


def _addresses(own: list[str], mirrors: tuple[str, ...]) -> tuple[str, ...]:
    """The photo's own addresses first, each once; what cannot be asked over the web is left out."""
    usable = [url for url in own if is_web_address(url)]
    others = [mirror.rstrip("/") + urlsplit(url).path for mirror in mirrors for url in usable]
    return tuple(dict.fromkeys([*usable, *others]))
