"""Fetch all files of one dataset: download what is missing, and say exactly which files to get by hand."""

import json
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.pool import ThreadPool
from pathlib import Path

from diffcap.fetching.archive import DamagedArchive, extract, is_archive
from diffcap.fetching.download import Client, Target
from diffcap.fetching.folder import DatasetFolder, Failure, exclusive_lock
from diffcap.fetching.photos import fetch_photos
from diffcap.fetching.sources import Entry, FetchSettings, read_sources
from diffcap.records import write_json, write_text
from diffcap.utils.console import echo
from diffcap.utils.errors import DiffcapError
from diffcap.utils.progress import Update, progress_bars

_MAX_PRINTED = 10  # failures; fetch-failures.json has all
_UNFINISHED = (".part", ".crdownload", ".download")  # suffixes of unfinished downloads of browsers


def fetch(
    dataset: str,
    folder: Path,
    sources: Path,
    settings: FetchSettings,
    captions_only: bool = False,
    incomplete: bool = False,
) -> tuple[Path, frozenset[str]]:
    """Fetch everything of a dataset that is missing.

    Args:
        folder: `data/<dataset>`. sources: YAML file that lists the dataset's files.
        captions_only: skip files that only the images need.
        incomplete: accept photos that could not be downloaded now; photos that no longer exist are always accepted.

    Returns:
        The folder for the dataset's reader, and the images, relative to it, that no longer exist online.
    """
    if settings.jobs < 1 or settings.timeout <= 0 or min(settings.retries, settings.backoff, settings.patience) < 0:
        raise DiffcapError(
            "--fetch.jobs must be at least 1, --fetch.timeout above 0, the others not below 0; fix them."
        )
    known = read_sources(sources)
    print(f"{known.name}, {known.page}\n  licence: {known.licence}\n  please cite: {known.citation}", flush=True)
    files, by_hand = (
        [entry for entry in entries if not (captions_only and entry.images)] for entries in (known.files, known.by_hand)
    )
    with exclusive_lock(folder):
        data = DatasetFolder(dataset, folder)
        photos: list[Failure] = []
        try:
            failures = _fetch_files(files, data, settings)
            for entry in by_hand:
                failures += _ingest(entry, data)
            if known.photos is not None and not captions_only:
                photos = fetch_photos(known.photos, data, settings)
        finally:
            data.checksums.save()
        missing = [entry for entry in by_hand if not data.is_complete(entry)]
        _report(failures + photos, missing, data)
    required = failures + [photo for photo in photos if not photo.gone and not incomplete]
    if required or missing:
        raise DiffcapError(_summary(required, missing, data, only_photos=not failures and not missing))
    gone = frozenset(photo.name.removeprefix("official/") for photo in photos if photo.gone)
    return data.official, gone


def _fetch_files(entries: list[Entry], data: DatasetFolder, settings: FetchSettings) -> list[Failure]:
    """Download and extract the files that are missing; returns those that failed."""
    entries = [entry for entry in entries if not (entry.unpack and data.is_extracted(entry, data.target(entry)))]
    client, failed = Client(settings), dict[Entry, Failure]()
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
    exists, known = path.is_file(), bool(entry.sha256 or entry.md5 or data.checksums.sha256(path))
    target = Target(path, _verifier(entry, path, data), known)
    if not exists:
        target = replace(target, progress=bar(f"fetching {entry.file}"))
    failure = data.fetch_file(target, (entry.url,), client)
    if not exists and not failure:
        print(f"fetched {path}, {path.stat().st_size:,} bytes, SHA-256 {data.checksums.sha256(path)}", flush=True)
    return failure


def _ingest(entry: Entry, data: DatasetFolder) -> list[Failure]:
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
    """A function that returns what is wrong with a file that belongs to `path`, "" for nothing."""

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
    """Extract an archive; returns the failure, if there is one."""
    print(f"extracting {archive} ...", flush=True)
    reason, folder, url = "", data.official / entry.to, entry.url or entry.page
    try:
        count = extract(archive, folder, entry.strip)
        if not data.is_complete(entry):
            reason = f"extracted, but {' or '.join(entry.gives)} is missing in {data.official}; put it there by hand"
    except DiffcapError as error:
        reason = str(error).removeprefix(f"{archive}: ").rstrip(".")
        if isinstance(error, DamagedArchive) and entry.url and not (entry.sha256 or entry.md5):
            damaged = archive.replace(archive.with_name(f"{archive.name}.damaged"))
            data.checksums.remove(archive)
            reason = (
                f"{reason.partition('; ')[0]}; it was renamed to {damaged.name}, and the next run downloads it again"
            )
    if reason:
        return [Failure(data.checksums.name(archive), url, reason)]
    data.checksums.record(archive, url)
    write_text(data.marker(archive), f"{data.checksums.sha256(archive)}\n")
    print(f"extracted {count:,} files into {folder}; you may delete {archive}", flush=True)
    return []


def _report(failures: list[Failure], missing: list[Entry], data: DatasetFolder) -> None:
    """Write fetch-failures.json, and print the failures and the instructions for manual downloads."""
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
        print(
            f"to be downloaded by hand: {entry.file}\n"
            f"  from  {entry.page}\n"
            f"  how   {entry.how}\n"
            f"  into  {data.target(entry).parent}/{', the next run extracts it' if entry.unpack else ''}"
            f" (or put {', '.join(entry.gives)} into {data.official})\n"
            f"  then  make data DATASET={data.dataset}"
        )
    if missing:
        print(f"if you have the files already: make data DATASET={data.dataset} DATA=<their folder>", flush=True)


def _summary(failures: list[Failure], missing: list[Entry], data: DatasetFolder, only_photos: bool) -> str:
    parts = []
    if failures:
        more = f" and {len(failures) - 1:,} more" if len(failures) > 1 else ""
        parts.append(f"could not fetch {failures[0].name} ({failures[0].reason}){more}")
    if missing:
        files = " and ".join(f"{entry.file} from {entry.page} into {data.target(entry).parent}" for entry in missing)
        parts.append(f"download by hand {files}")
    skip = ", or skip the pairs of these photos with --missing skip" if only_photos else ""
    return f"{data.dataset}: {'; '.join(parts)}; then run the same command again{skip} (details: {data.failures})."
