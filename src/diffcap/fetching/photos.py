"""Photos that the annotations name by URL, one request each; those that are gone are told apart from those that failed."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from urllib.parse import urlsplit

from diffcap.datasets import OWN, READERS
from diffcap.errors import DiffcapError
from diffcap.fetching.checks import photo_check
from diffcap.fetching.hosts import Hosts
from diffcap.fetching.place import Failure, Place
from diffcap.fetching.progress import count_bar
from diffcap.fetching.settings import FetchSettings
from diffcap.fetching.sources import is_web_address
from diffcap.fetching.transfer import Refused, Unreachable, Wanted, transfer
from diffcap.fetching.workers import in_parallel

Job = tuple[Path, tuple[str, ...]]


def fetch_photos(mirrors: tuple[str, ...], place: Place, settings: FetchSettings) -> list[Failure]:
    """Fetch every photo that is not there yet; gives what failed.

    Args:
        mirrors: `https://host` of other servers that have the photos under the same paths.
        place: the dataset's folders; the module that reads the dataset has a function
            `photo_urls(folder) -> {path below the folder: addresses}`.
        settings: options of the command line.
    """
    reader = import_module(READERS.get(place.dataset, OWN))
    if not hasattr(reader, "photo_urls"):
        raise DiffcapError(f"{place.dataset}: its files name no photos by address; take photos out of its sources.")
    urls: dict[str, list[str]] = reader.photo_urls(place.official)
    jobs = [(place.official / path, _addresses(own, mirrors)) for path, own in urls.items()]
    hosts, failures, before = Hosts(settings.backoff), [], sum(target.is_file() for target, _ in jobs)
    with count_bar("photos", len(jobs)) as advance:
        for _, failure in in_parallel(_work(place, hosts, settings), jobs, settings.jobs, hosts.stop):
            advance()
            if failure:
                failures.append(failure)
    there = sum(target.is_file() for target, _ in jobs)
    gone = sum(failure.gone for failure in failures)
    print(f"photos: {there:,} of {len(jobs):,} are there, {there - before:,} of them new; {gone:,} are gone for good")
    return sorted(failures, key=lambda failure: failure.name)


def _work(place: Place, hosts: Hosts, settings: FetchSettings) -> Callable[[Job], Failure | None]:
    def work(job: Job) -> Failure | None:
        target, urls = job
        name = place.name(target)
        check = photo_check(name, place.ledger)
        if target.is_file():
            if problem := place.present(target, check):
                return Failure(name, urls[0] if urls else "", f"{problem}; delete it to have it fetched")
            place.note(target, "")
            return None
        if not urls:
            return Failure(name, "", "no web address is given for it", gone=True)
        wanted = Wanted(urls, target, None, check, known=bool(place.ledger.sha256(name)), vouched=True)
        try:
            url = transfer(wanted, hosts, settings, lambda there, total: None)
        except (Refused, Unreachable) as error:
            return Failure(name, urls[0], str(error), isinstance(error, Refused) and error.gone)
        place.note(target, url)
        return None

    return work


def _addresses(own: list[str], mirrors: tuple[str, ...]) -> tuple[str, ...]:
    """The photo's own addresses first, each once; what cannot be asked over the web is left out."""
    usable = [url for url in own if is_web_address(url)]
    others = [mirror.rstrip("/") + urlsplit(url).path for mirror in mirrors for url in usable]
    return tuple(dict.fromkeys([*usable, *others]))
