"""The files of a dataset that have an address each: fetched or brought by hand, checked, taken apart."""

from pathlib import Path

from diffcap.errors import DiffcapError
from diffcap.fetching.checks import entry_check
from diffcap.fetching.hosts import Hosts
from diffcap.fetching.place import Failure, Place
from diffcap.fetching.settings import FetchSettings
from diffcap.fetching.sources import Entry
from diffcap.fetching.transfer import Refused, Unreachable, Wanted, transfer
from diffcap.fetching.unpack import Damaged, unpack
from diffcap.fetching.workers import in_parallel
from diffcap.progress import bars
from diffcap.records import write_text

_MEND = "delete it, and it is fetched again; or take its lines out of checksums.json to keep it as it is"

_UNFINISHED = (".part", ".crdownload", ".download")  # what browsers write


def fetch_files(entries: list[Entry], place: Place, settings: FetchSettings) -> list[Failure]:
    """Fetch and unpack what is not there yet; gives what failed."""
    missing, failures, settled = [], [], set()
    for entry in entries:
        target = place.target(entry)
        if entry.unpack and place.stamp(target).is_file() and place.gives(entry):
            settled.add(entry)  # the archive itself may be gone
        elif not target.is_file():
            missing.append(entry)
        elif problem := place.present(target, entry_check(entry, place.name(target), place.ledger)):
            failures.append(Failure(place.name(target), entry.url, f"{problem}; {_MEND}"))
        elif not entry.unpack:
            place.note(target, entry.url)
    failures += _bring(missing, place, settings)
    lost = {failure.name for failure in failures}
    for entry in entries:
        if entry.unpack and entry not in settled and place.name(place.target(entry)) not in lost:
            failures += _take_apart(entry, place.target(entry), place)
    return failures


def take_in(entries: list[Entry], place: Place) -> tuple[list[Entry], list[Failure]]:
    """Unpack what a person put into `downloads`; gives what is still to be brought, and what is not what it should be."""
    todo, failures = [], []
    for entry in entries:
        files = sorted(place.downloads.glob(entry.file)) if entry.unpack else [place.target(entry)]
        for path in files:
            if not path.is_file() or path.suffix in _UNFINISHED:
                continue
            if entry.unpack and place.stamp(path).is_file() and place.gives(entry):
                continue
            if problem := place.present(path, entry_check(entry, place.name(path), place.ledger)):
                failures.append(Failure(place.name(path), entry.page, f"{problem}; fetch it again"))
            elif entry.unpack:
                failures += _take_apart(entry, path, place)
            else:
                place.note(path, entry.page)
        if not place.gives(entry):
            todo.append(entry)
    return todo, failures


def _bring(entries: list[Entry], place: Place, settings: FetchSettings) -> list[Failure]:
    hosts, failures = Hosts(settings.backoff), []
    with bars(of_bytes=True) as bar:

        def work(entry: Entry) -> Failure | None:
            target = place.target(entry)
            name, proven = place.name(target), bool(entry.sha256 or entry.md5)
            wanted = Wanted(
                (entry.url,),
                target,
                entry.size,
                entry_check(entry, name, place.ledger),
                known=proven or bool(place.ledger.sha256(name)),
                vouched=proven or entry.file.endswith(".json"),
            )
            try:
                transfer(wanted, hosts, settings, bar(f"fetching {entry.file}"))
            except (Refused, Unreachable) as error:
                return Failure(name, entry.url, str(error))
            place.note(target, entry.url)
            return None

        for entry, failure in in_parallel(work, entries, settings.jobs, hosts.stop):
            path = place.target(entry)
            if failure:
                failures.append(failure)
            else:
                digest = place.ledger.sha256(place.name(path))
                print(f"fetched {path}, {path.stat().st_size:,} bytes, SHA-256 {digest}", flush=True)
    return failures


def _take_apart(entry: Entry, archive: Path, place: Place) -> list[Failure]:
    """Unpack an archive; gives what is wrong with it, if anything is."""
    print(f"unpacking {archive} ...", flush=True)
    why = ""
    try:
        count = unpack(archive, place.official / entry.to, entry.strip)
        if not place.gives(entry):
            why = f"unpacked, but it has no {' or no '.join(entry.gives)} for {place.official}; put it there by hand"
    except DiffcapError as error:
        why = str(error).removeprefix(f"{archive}: ").rstrip(".")
        if isinstance(error, Damaged) and entry.url and not (entry.sha256 or entry.md5):
            aside = archive.replace(archive.with_name(f"{archive.name}.damaged"))  # else every run would find it there
            place.ledger.forget(place.name(archive))
            why = f"{why.partition('; ')[0]}; it is called {aside.name} now, and the next run fetches another"
    if why:
        return [Failure(place.name(archive), entry.url or entry.page, why)]
    place.note(archive, entry.url or entry.page)  # only now: a damaged one may be replaced
    write_text(place.stamp(archive), f"{place.ledger.sha256(place.name(archive))}\n")
    print(f"unpacked {count:,} files into {place.official / entry.to}; {archive} may be deleted now", flush=True)
    return []
