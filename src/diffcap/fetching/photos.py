"""Download photos that the annotations name by URL, and tell photos that no longer exist from those that failed.

A photo is gone if its server says so. It is also gone if every URL refuses it, its own with status 403, while the same host
still delivers another photo of the dataset; a host that has blocked us delivers none.
"""

from dataclasses import replace
from multiprocessing.pool import ThreadPool
from pathlib import Path
from urllib.parse import urlsplit

from diffcap.datasets.registry import get_dataset
from diffcap.fetching.download import Client, Target, host_of
from diffcap.fetching.folder import DatasetFolder, Failure
from diffcap.fetching.sources import FetchSettings, is_web_address
from diffcap.registry import import_object
from diffcap.utils.errors import DiffcapError
from diffcap.utils.progress import progress_bar

_PROBES = 3  # photos already downloaded from a host that are requested again, to see whether it still delivers any


def fetch_photos(mirrors: tuple[str, ...], folder: DatasetFolder, settings: FetchSettings) -> list[Failure]:
    """Download every missing photo; returns those that failed.

    Args:
        mirrors: `https://host` of other servers that have the photos under the same paths.
        folder: of a dataset whose `DatasetSpec.photo_urls` gives {path relative to the folder: list of URLs}.
    """
    photo_urls = get_dataset(folder.dataset).photo_urls
    if photo_urls is None:
        raise DiffcapError(f"{folder.dataset}: its annotations have no photo URLs; delete `photos` from its sources.")
    photos = [
        (folder.official / path, _with_mirrors(urls, mirrors))
        for path, urls in import_object(photo_urls)(folder.official).items()
    ]
    before = sum(path.is_file() for path, _ in photos)
    client, failures = Client(settings), []
    try:
        with progress_bar("fetching photos", len(photos)) as advance, ThreadPool(settings.jobs) as pool:
            for failure in pool.imap_unordered(lambda photo: _fetch_photo(*photo, folder, client), photos):
                advance(1)
                if failure:
                    failures.append(failure)
    finally:
        client.cancelled.set()
    failures = _decide_forbidden(failures, [folder.checksums.url(path) for path, _ in photos], client)
    now, gone = sum(path.is_file() for path, _ in photos), sum(failure.gone for failure in failures)
    print(
        f"photos: {now:,} of {len(photos):,} exist, {now - before:,} of them are new; {gone:,} no longer exist online"
    )
    return sorted(failures, key=lambda failure: failure.name)


def _fetch_photo(path: Path, urls: tuple[str, ...], folder: DatasetFolder, client: Client) -> Failure | None:
    from diffcap.datasets.images import image_problem

    sums = folder.checksums
    if not urls and not path.is_file():
        return Failure(sums.name(path), "", "the annotations give no web address for it", gone=True)
    target = Target(
        path, lambda file: image_problem(file) or sums.download_problem(file, path), bool(sums.sha256(path))
    )
    return folder.fetch_file(target, urls, client)


def _decide_forbidden(failures: list[Failure], delivered: list[str], client: Client) -> list[Failure]:
    """Mark forbidden photos as gone if their host still delivers one of the photos that it `delivered` before."""
    hosts = {host_of(failure.url) for failure in failures if failure.forbidden}
    probes = {host: [url for url in delivered if url and host_of(url) == host][-_PROBES:] for host in hosts}
    open_hosts = {host for host, urls in probes.items() if any(map(client.delivers, urls))}
    return [
        replace(failure, gone=failure.gone or (failure.forbidden and host_of(failure.url) in open_hosts))
        for failure in failures
    ]


def _with_mirrors(urls: list[str], mirrors: tuple[str, ...]) -> tuple[str, ...]:
    """The photo's own URLs first, then those of the mirrors, without duplicates and without what is not on the web."""
    usable = [url for url in urls if is_web_address(url)]
    others = [mirror.rstrip("/") + urlsplit(url).path for mirror in mirrors for url in usable]
    return tuple(dict.fromkeys([*usable, *others]))
