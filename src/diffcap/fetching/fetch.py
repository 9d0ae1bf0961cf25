"""Fetch all files of one dataset: download what is missing, and say exactly which files to get by hand.

data/<dataset>/official/               files in the layout that the dataset's reader expects
data/<dataset>/downloads/              archives, and unfinished downloads (*.part)
data/<dataset>/checksums.json          SHA-256 of every file when it was first fetched; later copies must have the same content
data/<dataset>/fetch-failures.json     missing files and the reasons; deleted when nothing is missing
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from diffcap.datasets.registry import get_dataset
from diffcap.fetching.archive import extract, is_archive
from diffcap.fetching.download import Client, PermanentError, Target, TransientError, download, host_of
from diffcap.fetching.sources import Entry, FetchSettings, is_web_address, read_sources
from diffcap.records import file_hash, read_json, write_json, write_text
from diffcap.registry import import_object
from diffcap.utils.console import echo
from diffcap.utils.errors import DiffcapError
from diffcap.utils.progress import Update, progress_bar, progress_bars

_MAX_PRINTED = 10  # failures; fetch-failures.json has all
_PROBES = 3  # number of downloaded photos that are requested again, to test whether a host still delivers any
_UNFINISHED = (".part", ".crdownload", ".download")  # suffixes of unfinished downloads of browsers


@dataclass(frozen=True)
class Failure:
    """A file that could not be fetched."""

    name: str  # path relative to `data/<dataset>`
    url: str  # where it should come from
    reason: str
    gone: bool = False  # the server does not have the file (any more)
    # Every URL refused it, its own with status 403: the server refuses the file, or the client.
    forbidden: bool = False


class Checksums:
    """Checksums of the files below `folder`, in `checksums.json`; several threads may record files.

        {"downloads/CUB_200_2011.tgz": {"sha256": "...", "size": 1150585339, "stamp": 1763..., "url": "https://..."}, ...}

    `stamp` is the modification time in nanoseconds. A file that still has the recorded size and time is not hashed again.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.path = folder / "checksums.json"
        remedy = "fix it, or delete it to record the checksums of the present files"
        self._rows: dict[str, Any] = read_json(self.path, "checksums", remedy) if self.path.is_file() else {}

    def name(self, path: Path) -> str:
        """Return the name of a file in `checksums.json` and in messages."""
        return path.relative_to(self.folder).as_posix()

    def sha256(self, path: Path) -> str:
        """Return the recorded checksum; "" if there is none."""
        return str(self._rows.get(self.name(path), {}).get("sha256", ""))

    def url(self, path: Path) -> str:
        """Return the URL that a file was downloaded from; "" if it was not downloaded."""
        return str(self._rows.get(self.name(path), {}).get("url", ""))

    def record(self, path: Path, url: str) -> None:
        """Record the checksum of a verified file, unless one is recorded already."""
        if not self.sha256(path):
            status = path.stat()
            row = {"sha256": file_hash(path), "size": status.st_size, "stamp": status.st_mtime_ns}
            self._rows[self.name(path)] = {**row, "url": url} if url else row

    def remove(self, path: Path) -> None:
        """Delete the record of a damaged file, so that a file with another content is accepted."""
        self._rows.pop(self.name(path), None)

    def save(self) -> None:
        """Write the file, if there is anything to write."""
        if self._rows or self.path.is_file():
            write_json(self.path, dict(sorted(self._rows.copy().items())))

    def existing_problem(self, path: Path, verify: Callable[[Path], str]) -> str:
        """Return what is wrong with an existing file, or "".

        A recorded file must be unchanged. A file without a record (copied by hand, or the process was killed) is verified.
        """
        row = self._rows.get(self.name(path))
        status = path.stat()
        if row is None:
            return verify(path)
        if (row.get("size"), row.get("stamp")) != (status.st_size, status.st_mtime_ns):
            if file_hash(path) != row["sha256"]:
                return f"its content differs from the checksum in {self.path}"
            row.update(size=status.st_size, stamp=status.st_mtime_ns)  # copied or touched
        return ""

    def download_problem(self, file: Path, path: Path, sha256: str = "", md5: str = "") -> str:
        """Return how a downloaded `file` differs from the publisher's checksums or the one recorded for `path`, or ""."""
        if md5:
            with file.open("rb") as content:
                if (found := hashlib.file_digest(content, "md5").hexdigest()) != md5.lower():
                    return f"its MD5 is {found}, but the publisher's is {md5.lower()}"
        recorded = self.sha256(path)
        found = file_hash(file) if sha256 or recorded else ""
        if sha256 and found != sha256.lower():
            return f"its SHA-256 is {found}, but the publisher's is {sha256.lower()}"
        if recorded and found != recorded:
            name = self.name(path)
            return f"its SHA-256 is {found}, but it was {recorded} at the first fetch; to accept it, delete {name} from {self.path}"
        return ""


class DatasetFolder:
    """Paths and checksums of one dataset's folder, `data/<dataset>`."""

    def __init__(self, dataset: str, path: Path):
        self.dataset = dataset
        self.checksums = Checksums(path)
        self.official = path / "official"
        self.downloads = path / "downloads"
        self.failures = path / "fetch-failures.json"

    def target(self, entry: Entry) -> Path:
        """Return the path for a file that is downloaded, or copied by hand."""
        return self.downloads / entry.file if entry.unpack else self.official / entry.to / entry.file

    def fetch_file(self, target: Target, urls: tuple[str, ...], client: Client) -> Failure | None:
        """Download a file that is missing, or verify one that exists, and record its checksum."""
        path = target.path
        checksums = self.checksums
        name = checksums.name(path)
        url = next(iter(urls), "")
        if path.is_file():
            if problem := checksums.existing_problem(path, target.verify):
                fix = f"delete it to download it in the next run; to keep it, delete its entry in {checksums.path}"
                return Failure(name, url, f"{problem}; {fix}")
            checksums.record(path, "")
            return None
        try:
            checksums.record(path, download(urls, target, client))
        except TransientError as error:
            return Failure(name, url, str(error))
        except PermanentError as error:
            return Failure(name, url, str(error), error.gone, error.forbidden)
        return None

    def is_complete(self, entry: Entry) -> bool:
        """Return whether all paths that an entry provides (`gives`) exist; an empty folder does not count."""
        paths = [self.official / name for name in entry.gives]
        return all(any(path.iterdir()) if path.is_dir() else path.is_file() for path in paths)

    def marker(self, archive: Path) -> Path:
        """Return the file that marks an archive as extracted, in `official`, so that it is deleted with the extracted files."""
        return self.official / ".unpacked" / archive.name

    def is_extracted(self, entry: Entry, archive: Path) -> bool:
        """Return whether the archive was extracted and its files still exist; the archive itself may be deleted."""
        return self.marker(archive).is_file() and self.is_complete(entry)


def fetch(
    dataset: str,
    folder: Path,
    sources: Path,
    settings: FetchSettings,
    captions_only: bool = False,
    incomplete: bool = False,
) -> tuple[Path, frozenset[str]]:
    """Fetch all missing files of a dataset into its `folder`, `data/<dataset>`, from the URLs in a YAML file (`sources`).

    Args:
        captions_only: skip files that only the images need.
        incomplete: accept that photos could not be downloaded now; photos that no longer exist online are never an error.

    Returns:
        The folder for the dataset's reader, and the images, relative to it, that no longer exist online.
    """
    if settings.jobs < 1 or settings.timeout <= 0 or min(settings.retries, settings.backoff, settings.patience) < 0:
        raise DiffcapError("--fetch.jobs must be at least 1, --fetch.timeout above 0, the others at least 0.")
    known = read_sources(sources)
    print(f"{known.name}, {known.page}\n  licence: {known.licence}\n  please cite: {known.citation}", flush=True)
    files, by_hand = (
        [entry for entry in entries if not (captions_only and entry.images)] for entries in (known.files, known.by_hand)
    )
    data = DatasetFolder(dataset, folder)
    data.downloads.mkdir(parents=True, exist_ok=True)
    photos: list[Failure] = []
    try:
        failures = _fetch_files(files, data, settings)
        for entry in by_hand:
            failures += _accept_manual_files(entry, data)
        if known.photos is not None and not captions_only:
            photos = _fetch_photos(known.photos, data, settings)
    finally:
        data.checksums.save()
    missing = [entry for entry in by_hand if not data.is_complete(entry)]
    _report(failures, photos, missing, data, incomplete)
    gone = frozenset(photo.name.removeprefix("official/") for photo in photos if photo.gone)
    return data.official, gone


def _fetch_files(entries: list[Entry], data: DatasetFolder, settings: FetchSettings) -> list[Failure]:
    """Download and extract the files that are missing; returns those that failed."""
    entries = [entry for entry in entries if not (entry.unpack and data.is_extracted(entry, data.target(entry)))]
    client = Client(settings)
    failed = dict[Entry, Failure]()
    try:
        with progress_bars(of_bytes=True) as bar, ThreadPool(settings.jobs) as pool:
            results = pool.imap(lambda entry: _download_entry(entry, data, client, bar), entries)
            failed = {entry: failure for entry, failure in zip(entries, results) if failure}
    finally:
        client.cancelled.set()
    failures = list(failed.values())
    for entry in entries:
        if entry.unpack and entry not in failed:
            failures += _extract(entry, data.target(entry), data)
    return failures


def _download_entry(entry: Entry, data: DatasetFolder, client: Client, bar: Callable[[str], Update]) -> Failure | None:
    path = data.target(entry)
    exists = path.is_file()
    has_checksum = bool(entry.sha256 or entry.md5 or data.checksums.sha256(path))
    target = Target(path, _verifier(entry, path, data), has_checksum)
    if not exists:
        target = replace(target, progress=bar(f"fetching {entry.file}"))
    failure = data.fetch_file(target, (entry.url,), client)
    if not exists and not failure:
        print(f"fetched {path}, {path.stat().st_size:,} bytes, SHA-256 {data.checksums.sha256(path)}", flush=True)
    return failure


def _accept_manual_files(entry: Entry, data: DatasetFolder) -> list[Failure]:
    """Verify and extract files that a person has put into the dataset's folder; returns those that are damaged."""
    failures = []
    for path in sorted(data.downloads.glob(entry.file)) if entry.unpack else [data.target(entry)]:
        if not path.is_file() or path.suffix in _UNFINISHED or (entry.unpack and data.is_extracted(entry, path)):
            continue
        if problem := data.checksums.existing_problem(path, _verifier(entry, path, data)):
            failures.append(Failure(data.checksums.name(path), entry.page, f"{problem}; get it again"))
        elif entry.unpack:
            failures += _extract(entry, path, data)
        else:
            data.checksums.record(path, entry.page)
    return failures


def _verifier(entry: Entry, path: Path, data: DatasetFolder) -> Callable[[Path], str]:
    """Return a function that returns what is wrong with a file that belongs to `path`, or ""."""

    def verify(file: Path) -> str:
        if entry.size not in (None, size := file.stat().st_size):
            return f"{size:,} bytes long, but the publisher's is {entry.size:,}"
        if entry.unpack and not is_archive(file):
            return "not a zip or tar file"
        if entry.file.endswith(".json"):
            try:
                json.loads(file.read_bytes())
            except (ValueError, RecursionError):
                return "not valid JSON"
        return data.checksums.download_problem(file, path, entry.sha256, entry.md5)

    return verify


def _extract(entry: Entry, archive: Path, data: DatasetFolder) -> list[Failure]:
    """Extract an archive; returns the failures, at most one."""
    print(f"extracting {archive} ...", flush=True)
    reason = ""
    folder = data.official / entry.to
    url = entry.url or entry.page
    try:
        count = extract(archive, folder, entry.strip)
        if not data.is_complete(entry):
            reason = f"extracted, but {' or '.join(entry.gives)} is missing in {data.official}; put it there by hand"
    except DiffcapError as error:
        reason = str(error).removeprefix(f"{archive}: ").rstrip(".")
        data.checksums.remove(archive)  # so that another download with another content is accepted
    if reason:
        return [Failure(data.checksums.name(archive), url, reason)]
    data.checksums.record(archive, url)
    write_text(data.marker(archive), f"{data.checksums.sha256(archive)}\n")
    print(f"extracted {count:,} files into {folder}; you may delete {archive}", flush=True)
    return []


def _report(
    files: list[Failure], photos: list[Failure], missing: list[Entry], data: DatasetFolder, incomplete: bool
) -> None:
    """Write fetch-failures.json, and print the failures; raise an error if required files are missing."""
    failures = files + photos
    if not failures and not missing:
        data.failures.unlink(missing_ok=True)
        return
    failed = [{"name": row.name, "url": row.url, "why": row.reason, "gone": row.gone} for row in failures]
    by_hand = [
        {"file": entry.file, "page": entry.page, "how": entry.how, "put_into": str(data.target(entry).parent)}
        for entry in missing
    ]
    write_json(data.failures, {"failed": failed, "by_hand": by_hand})
    for failure in failures[:_MAX_PRINTED]:
        echo(f"not fetched: {failure.name} from {failure.url}: {failure.reason}")
    if len(failures) > _MAX_PRINTED:
        print(f"not fetched: {len(failures) - _MAX_PRINTED:,} more, see {data.failures}")
    for entry in missing:
        print(f"to be downloaded by hand: {entry.file}. How: {entry.how}", flush=True)
    required = files + [photo for photo in photos if not photo.gone and not incomplete]
    parts = []
    if required:
        more = f" and {len(required) - 1:,} more" if len(required) > 1 else ""
        parts.append(f"could not fetch {required[0].name} ({required[0].reason}){more}")
    if missing:
        listed = " and ".join(
            f"{entry.file} from {entry.page} into {data.target(entry).parent} (or {', '.join(entry.gives)} into {data.official})"
            for entry in missing
        )
        parts.append(f"download by hand {listed}")
    if parts:
        skip = "" if files or missing else ", or skip the pairs of these photos with --missing skip"
        folder = f", or give DATA=<folder> (--source) if you have all files (details: {data.failures})."
        raise DiffcapError(f"{data.dataset}: {'; '.join(parts)}; then run the same command again{skip}{folder}")


def _fetch_photos(mirrors: tuple[str, ...], folder: DatasetFolder, settings: FetchSettings) -> list[Failure]:
    """Download every missing photo by the dataset's `photo_urls` or from `mirrors`; returns those that failed.

    A photo is gone if its server answers so (such as 404). It is also gone if every URL refuses it, its own with status 403,
    and the same host still delivers another photo of the dataset. A host that has blocked the client delivers none.
    """
    photos = []
    for path, urls in import_object(get_dataset(folder.dataset).photo_urls or "")(folder.official).items():
        web_urls = [url for url in urls if is_web_address(url)]
        mirror_urls = [mirror.rstrip("/") + urlsplit(url).path for mirror in mirrors for url in web_urls]
        photos.append((folder.official / path, tuple(dict.fromkeys([*web_urls, *mirror_urls]))))
    earlier = sum(path.is_file() for path, _ in photos)
    client = Client(settings)
    failures = []
    try:
        with progress_bar("fetching photos", len(photos)) as advance, ThreadPool(settings.jobs) as pool:
            for failure in pool.imap_unordered(lambda photo: _fetch_photo(*photo, folder, client), photos):
                advance(1)
                if failure:
                    failures.append(failure)
    finally:
        client.cancelled.set()
    delivered = [url for path, _ in photos if (url := folder.checksums.url(path))]
    hosts = {host_of(failure.url) for failure in failures if failure.forbidden}
    probes = {host: [url for url in delivered if host_of(url) == host][-_PROBES:] for host in hosts}
    open_hosts = {host for host, urls in probes.items() if any(map(client.delivers, urls))}
    failures = [
        replace(failure, gone=failure.gone or (failure.forbidden and host_of(failure.url) in open_hosts))
        for failure in failures
    ]
    present = sum(path.is_file() for path, _ in photos)
    gone = sum(failure.gone for failure in failures)
    print(
        f"photos: {present:,} of {len(photos):,} exist, {present - earlier:,} of them are new; {gone:,} no longer exist online"
    )
    return sorted(failures, key=lambda failure: failure.name)


def _fetch_photo(path: Path, urls: tuple[str, ...], folder: DatasetFolder, client: Client) -> Failure | None:
    from diffcap.datasets.images import image_problem

    checksums = folder.checksums
    if not urls and not path.is_file():
        return Failure(checksums.name(path), "", "the annotations give no web address for it", gone=True)
    target = Target(
        path, lambda file: image_problem(file) or checksums.download_problem(file, path), bool(checksums.sha256(path))
    )
    return folder.fetch_file(target, urls, client)
