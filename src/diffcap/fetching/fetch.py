"""Fetch all files of one dataset: download the missing files, and list those that a person must download.

data/<dataset>/official/               files in the folders that the dataset's reader expects
data/<dataset>/downloads/              archives, and unfinished downloads (*.part)
data/<dataset>/checksums.json          SHA-256 of every file when it was first fetched; later copies must have the same content
data/<dataset>/fetch-failures.json     missing files and why they are missing; deleted when no file is missing
configs/sources/<dataset>.yaml         an entry for each file; `diffcap.fetching.sources` explains the keys of an entry
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
from diffcap.fetching.download import Client, PermanentError, Target, TransientError, download
from diffcap.fetching.sources import Entry, FetchSettings, is_web_address, read_sources
from diffcap.records import file_hash, read_json, write_json, write_text
from diffcap.registry import import_object
from diffcap.utils.console import echo
from diffcap.utils.errors import DiffcapError
from diffcap.utils.progress import Update, progress_bar, progress_bars

_MAX_PRINTED_FAILURES = 10  # fetch-failures.json lists all failures


@dataclass(frozen=True)
class Failure:
    """A file that could not be fetched."""

    name: str  # path relative to `data/<dataset>`
    url: str  # address of the file, or of the page where a person can download it
    reason: str  # why it could not be fetched
    gone: bool = False  # the server does not have the file (any more)
    forbidden: bool = False  # every URL refused the file, the first with status 403; the server may block this client


class Checksums:
    """Reads and writes `checksums.json`, the checksums of the files below `folder`. Several threads may record files.

        {"downloads/CUB_200_2011.tgz": {"sha256": "...", "size": 1150585339, "stamp": 1763..., "url": "https://..."}, ...}

    `stamp` is the modification time in nanoseconds. A file whose size and time are still the recorded ones is not hashed again.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.path = folder / "checksums.json"
        remedy = "fix it, or delete it to record the checksums of the present files"
        self._records: dict[str, Any] = read_json(self.path, "checksums", remedy) if self.path.is_file() else {}

    def name(self, path: Path) -> str:
        """Return the name of a file in `checksums.json` and in messages."""
        return path.relative_to(self.folder).as_posix()

    def sha256(self, path: Path) -> str:
        """Return the recorded checksum; "" if there is none."""
        return str(self._records.get(self.name(path), {}).get("sha256", ""))

    def url(self, path: Path) -> str:
        """Return the URL from which a file was downloaded; "" if the file was not downloaded."""
        return str(self._records.get(self.name(path), {}).get("url", ""))

    def record(self, path: Path, url: str) -> None:
        """Record the checksum of a verified file and its `url` ("": unknown), unless the file already has a record."""
        if not self.sha256(path):
            status = path.stat()
            values = {"sha256": file_hash(path), "size": status.st_size, "stamp": status.st_mtime_ns}
            self._records[self.name(path)] = {**values, "url": url} if url else values

    def remove(self, path: Path) -> None:
        """Delete the record of a damaged file, so that a file with another content is accepted."""
        self._records.pop(self.name(path), None)

    def save(self) -> None:
        """Write `checksums.json`. If there are no records, write it only if it already exists."""
        if self._records or self.path.is_file():
            write_json(self.path, dict(sorted(self._records.copy().items())))

    def check_existing(self, path: Path, verify: Callable[[Path], str]) -> str:
        """Return what is wrong with an existing file, or "".

        A recorded file must be unchanged. `verify` checks a file without a record, which was copied by hand or whose process was killed.
        """
        record = self._records.get(self.name(path))
        status = path.stat()
        if record is None:
            return verify(path)
        if (record.get("size"), record.get("stamp")) != (status.st_size, status.st_mtime_ns):
            if file_hash(path) != record["sha256"]:
                return f"its content differs from the checksum in {self.path}"
            record.update(size=status.st_size, stamp=status.st_mtime_ns)  # the file was only copied or touched
        return ""

    def check_download(self, file: Path, path: Path, sha256: str = "", md5: str = "") -> str:
        """Return how a downloaded `file` differs from the publisher's checksums or from the recorded checksum of `path`; "" if equal."""
        if md5:
            with file.open("rb") as content:
                if (file_md5 := hashlib.file_digest(content, "md5").hexdigest()) != md5.lower():
                    return f"its MD5 is {file_md5}, but the publisher's is {md5.lower()}"
        old_sha256 = self.sha256(path)
        file_sha256 = file_hash(file) if sha256 or old_sha256 else ""
        if sha256 and file_sha256 != sha256.lower():
            return f"its SHA-256 is {file_sha256}, but the publisher's is {sha256.lower()}"
        if old_sha256 and file_sha256 != old_sha256:
            fix = f"to accept it, delete {self.name(path)} from {self.path}"
            return f"its SHA-256 is {file_sha256}, but it was {old_sha256} at the first fetch; {fix}"
        return ""


class DatasetFolder:
    """Paths and checksums of one dataset's folder, `data/<dataset>`."""

    def __init__(self, dataset: str, path: Path):
        self.dataset = dataset
        self.checksums = Checksums(path)
        self.official_folder = path / "official"
        self.download_folder = path / "downloads"
        self.failure_file = path / "fetch-failures.json"

    def path_of(self, entry: Entry) -> Path:
        """Return the path to which an entry's file is downloaded, or must be copied by hand."""
        return self.download_folder / entry.file if entry.unpack else self.official_folder / entry.to / entry.file

    def fetch_file(self, target: Target, urls: tuple[str, ...], client: Client) -> Failure | None:
        """Download a file that is missing, or verify one that exists, and record its checksum."""
        path = target.path
        checksums = self.checksums
        name = checksums.name(path)
        url = next(iter(urls), "")
        if path.is_file():
            if problem := checksums.check_existing(path, target.verify):
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
        """Return True if all paths that an entry provides (`gives`) exist. An empty folder counts as missing."""
        paths = [self.official_folder / name for name in entry.gives]
        return all(any(path.iterdir()) if path.is_dir() else path.is_file() for path in paths)

    def marker_file(self, archive: Path) -> Path:
        """Return the file that marks an archive as extracted. It is next to the extracted files, so that it is deleted with them."""
        return self.official_folder / ".unpacked" / archive.name

    def is_extracted(self, entry: Entry, archive: Path) -> bool:
        """Return True if an archive was extracted and the extracted files still exist. The archive may have been deleted."""
        return self.marker_file(archive).is_file() and self.is_complete(entry)


def fetch(
    dataset: str,
    path: Path,
    sources_file: Path,
    settings: FetchSettings,
    captions_only: bool = False,
    allow_missing_photos: bool = False,
) -> tuple[Path, frozenset[str]]:
    """Fetch all missing files of a dataset into its folder `path` (`data/<dataset>`) from the URLs in a YAML file.

    Args:
        captions_only: skip files that are needed for the images only.
        allow_missing_photos: accept that photos could not be downloaded now. Photos that no longer exist online are never an error.

    Returns:
        The folder that the dataset's reader reads, and the paths (relative to this folder) of images that no longer exist online.
    """
    if settings.jobs < 1 or settings.timeout <= 0 or min(settings.retries, settings.backoff, settings.patience) < 0:
        raise DiffcapError("--fetch.jobs must be at least 1, --fetch.timeout above 0, the others at least 0.")
    sources = read_sources(sources_file)
    licence = f"licence: {sources.licence}\n  please cite: {sources.citation}"
    print(f"{sources.name}, {sources.page}\n  {licence}", flush=True)
    file_entries = [entry for entry in sources.files if not (captions_only and entry.images)]
    manual_entries = [entry for entry in sources.by_hand if not (captions_only and entry.images)]
    folder = DatasetFolder(dataset, path)
    folder.download_folder.mkdir(parents=True, exist_ok=True)
    photo_failures: list[Failure] = []
    try:
        file_failures = _fetch_files(file_entries, folder, settings)
        for entry in manual_entries:
            file_failures += _accept_manual_files(entry, folder)
        if sources.photo_mirrors is not None and not captions_only:
            photo_failures = _fetch_photos(sources.photo_mirrors, folder, settings)
    finally:
        folder.checksums.save()
    missing_entries = [entry for entry in manual_entries if not folder.is_complete(entry)]
    _report_failures(file_failures, photo_failures, missing_entries, folder, allow_missing_photos)
    gone_images = frozenset(photo.name.removeprefix("official/") for photo in photo_failures if photo.gone)
    return folder.official_folder, gone_images


def _fetch_files(entries: list[Entry], folder: DatasetFolder, settings: FetchSettings) -> list[Failure]:
    entries = [entry for entry in entries if not (entry.unpack and folder.is_extracted(entry, folder.path_of(entry)))]
    client = Client(settings)
    failure_of = dict[Entry, Failure]()
    try:
        with progress_bars(of_bytes=True) as add_bar, ThreadPool(settings.jobs) as pool:
            results = pool.imap(lambda entry: _fetch_entry(entry, folder, client, add_bar), entries)
            failure_of = {entry: failure for entry, failure in zip(entries, results) if failure}
    finally:
        client.cancelled.set()
    failures = list(failure_of.values())
    for entry in entries:
        if entry.unpack and entry not in failure_of:
            failures += _extract_entry(entry, folder.path_of(entry), folder)
    return failures


def _fetch_entry(
    entry: Entry, folder: DatasetFolder, client: Client, add_bar: Callable[[str], Update]
) -> Failure | None:
    path = folder.path_of(entry)
    exists = path.is_file()
    has_checksum = bool(entry.sha256 or entry.md5 or folder.checksums.sha256(path))
    target = Target(path, _make_verifier(entry, path, folder), has_checksum)
    if not exists:
        target = replace(target, show_progress=add_bar(f"fetching {entry.file}"))
    failure = folder.fetch_file(target, (entry.url,), client)
    if not exists and not failure:
        print(f"fetched {path}, {path.stat().st_size:,} bytes, SHA-256 {folder.checksums.sha256(path)}", flush=True)
    return failure


def _accept_manual_files(entry: Entry, folder: DatasetFolder) -> list[Failure]:
    """Verify, and extract if needed, the files of a `by_hand` entry that the user has downloaded. Return a failure for each bad file."""
    failures = []
    for path in sorted(folder.download_folder.glob(entry.file)) if entry.unpack else [folder.path_of(entry)]:
        is_unfinished = path.suffix in (".part", ".crdownload", ".download")  # names of browsers' unfinished downloads
        if not path.is_file() or is_unfinished or (entry.unpack and folder.is_extracted(entry, path)):
            continue
        if problem := folder.checksums.check_existing(path, _make_verifier(entry, path, folder)):
            failures.append(Failure(folder.checksums.name(path), entry.page, f"{problem}; get it again"))
        elif entry.unpack:
            failures += _extract_entry(entry, path, folder)
        else:
            folder.checksums.record(path, entry.page)
    return failures


def _make_verifier(entry: Entry, path: Path, folder: DatasetFolder) -> Callable[[Path], str]:
    """Return a function that checks a file at `path`, or one that will be moved to `path`. It returns what is wrong with it, or ""."""

    def verify(file: Path) -> str:
        if entry.size not in (None, size := file.stat().st_size):
            return f"{size:,} bytes long, but the publisher's file is {entry.size:,}"
        if entry.unpack and not is_archive(file):
            return "not a zip or tar file"
        if entry.file.endswith(".json"):
            try:
                json.loads(file.read_bytes())
            except (ValueError, RecursionError):
                return "not valid JSON"
        return folder.checksums.check_download(file, path, entry.sha256, entry.md5)

    return verify


def _extract_entry(entry: Entry, archive: Path, folder: DatasetFolder) -> list[Failure]:
    print(f"extracting {archive} ...", flush=True)
    reason = ""
    target_folder = folder.official_folder / entry.to
    url = entry.url or entry.page
    try:
        count = extract(archive, target_folder, entry.strip)  # strip: number of leading folders to remove
        if not folder.is_complete(entry):
            missing = " or ".join(entry.gives)
            reason = f"extracted, but {missing} is missing in {folder.official_folder}; put it there by hand"
    except DiffcapError as error:
        reason = str(error).removeprefix(f"{archive}: ").rstrip(".")
        folder.checksums.remove(archive)  # so that another download with another content is accepted
    if reason:
        return [Failure(folder.checksums.name(archive), url, reason)]
    folder.checksums.record(archive, url)
    write_text(folder.marker_file(archive), f"{folder.checksums.sha256(archive)}\n")
    print(f"extracted {count:,} files into {target_folder}; you may delete {archive}", flush=True)
    return []


def _report_failures(
    file_failures: list[Failure],
    photo_failures: list[Failure],
    missing_entries: list[Entry],
    folder: DatasetFolder,
    allow_missing_photos: bool,
) -> None:
    """Write fetch-failures.json, and print the failures; raise an error if required files are missing."""
    failures = file_failures + photo_failures
    if not failures and not missing_entries:
        folder.failure_file.unlink(missing_ok=True)
        return
    failed = [{"name": item.name, "url": item.url, "why": item.reason, "gone": item.gone} for item in failures]
    by_hand = [
        {"file": entry.file, "page": entry.page, "how": entry.how, "put_into": str(folder.path_of(entry).parent)}
        for entry in missing_entries
    ]
    write_json(folder.failure_file, {"failed": failed, "by_hand": by_hand})
    for failure in failures[:_MAX_PRINTED_FAILURES]:
        echo(f"not fetched: {failure.name} from {failure.url}: {failure.reason}")
    if len(failures) > _MAX_PRINTED_FAILURES:
        print(f"not fetched: {len(failures) - _MAX_PRINTED_FAILURES:,} more, see {folder.failure_file}")
    for entry in missing_entries:
        print(f"to be downloaded by hand: {entry.file}. How: {entry.how}", flush=True)
    errors = file_failures + [photo for photo in photo_failures if not photo.gone and not allow_missing_photos]
    clauses = []
    if errors:
        more = f" and {len(errors) - 1:,} more" if len(errors) > 1 else ""
        clauses.append(f"could not fetch {errors[0].name} ({errors[0].reason}){more}")
    if missing_entries:
        file_list = " and ".join(
            f"{entry.file} from {entry.page} into {folder.path_of(entry).parent} (or {', '.join(entry.gives)} into "
            f"{folder.official_folder})"
            for entry in missing_entries
        )
        clauses.append(f"download by hand {file_list}")
    if clauses:
        has_photos_only = not file_failures and not missing_entries
        skip_hint = ", or skip the pairs of these photos with --missing skip" if has_photos_only else ""
        folder_hint = f", or give a folder with all files, make data DATA=<folder> (details: {folder.failure_file})."
        problems = "; ".join(clauses)
        raise DiffcapError(f"{folder.dataset}: {problems}; then run the same command again{skip_hint}{folder_hint}")


def _fetch_photos(mirrors: tuple[str, ...], folder: DatasetFolder, settings: FetchSettings) -> list[Failure]:
    """Download every missing photo from the URLs that the dataset's `photo_urls` returns, or from mirrors. Return the failures.

    A photo counts as gone if its server says so, for example with status 404. It also counts as gone if all its URLs refuse it, the first
    one with status 403, and the host of the first URL still delivers another photo, so that it has not blocked the client.
    """
    photos = []  # path and URLs of each photo
    for path, urls in import_object(get_dataset(folder.dataset).photo_urls or "")(folder.official_folder).items():
        web_urls = [url for url in urls if is_web_address(url)]
        mirror_urls = [mirror.rstrip("/") + urlsplit(url).path for mirror in mirrors for url in web_urls]
        photos.append((folder.official_folder / path, tuple(dict.fromkeys([*web_urls, *mirror_urls]))))
    num_before = sum(path.is_file() for path, _ in photos)
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
    delivered_urls = [url for path, _ in photos if (url := folder.checksums.url(path))]
    open_hosts = set()  # hosts that have not blocked the client
    for host in {urlsplit(failure.url).netloc for failure in failures if failure.forbidden}:
        probe_urls = [url for url in delivered_urls if urlsplit(url).netloc == host][-3:]
        if any(map(client.can_deliver, probe_urls)):
            open_hosts.add(host)
    for index, failure in enumerate(failures):
        if failure.forbidden and urlsplit(failure.url).netloc in open_hosts:
            failures[index] = replace(failure, gone=True)
    num_present = sum(path.is_file() for path, _ in photos)
    counts = f"{num_present:,} of {len(photos):,} exist, {num_present - num_before:,} of them are new"
    print(f"photos: {counts}; {sum(failure.gone for failure in failures):,} no longer exist online")
    return sorted(failures, key=lambda failure: failure.name)


def _fetch_photo(path: Path, urls: tuple[str, ...], folder: DatasetFolder, client: Client) -> Failure | None:
    from diffcap.datasets.images import image_problem

    checksums = folder.checksums
    if not urls and not path.is_file():
        return Failure(checksums.name(path), "", "the annotations give no web address for it", gone=True)
    target = Target(
        path, lambda file: image_problem(file) or checksums.check_download(file, path), bool(checksums.sha256(path))
    )
    return folder.fetch_file(target, urls, client)
