"""All files of one dataset: what is missing is fetched, and what only a person can fetch is said precisely."""

from dataclasses import dataclass
from pathlib import Path

from diffcap.console import echo
from diffcap.errors import DiffcapError
from diffcap.fetching.files import fetch_files, take_in
from diffcap.fetching.photos import fetch_photos
from diffcap.fetching.place import Failure, Place, alone
from diffcap.fetching.settings import FetchSettings
from diffcap.fetching.sources import Entry, read_sources
from diffcap.records import write_json

_SHOWN = 10  # failures; all are in the file


@dataclass(frozen=True)
class Fetched:
    """Where a dataset's files are now.

    Attributes:
        root: the folder for the reader.
        gone: images, relative to it, that their servers do not have any more.
    """

    root: Path
    gone: frozenset[str]


def fetch(
    dataset: str,
    folder: Path,
    sources: Path,
    settings: FetchSettings,
    captions_only: bool = False,
    incomplete: bool = False,
) -> Fetched:
    """Bring everything of a dataset that is not there yet; the second time, that is nothing.

    Args:
        dataset: its name.
        folder: `data/<dataset>`.
        sources: the YAML file that says where its files are.
        settings: options of the command line.
        captions_only: leave out what only the images need.
        incomplete: go on where photos could not be fetched; without it, only where their servers have them no more.

    Raises:
        DiffcapError: something is missing that the reader needs (the message says who has to do what), another process
            is fetching here, or an archive is refused.
    """
    if (
        settings.jobs < 1
        or settings.retries < 0
        or settings.timeout <= 0
        or min(settings.backoff, settings.patience) < 0
    ):
        raise DiffcapError(
            "--fetch.jobs must be at least 1, --fetch.timeout above 0, the others not below 0; fix them."
        )
    known = read_sources(sources)
    print(f"{known.name}, {known.page}\n  licence: {known.licence}\n  please cite: {known.citation}", flush=True)
    files, by_hand = (
        [entry for entry in entries if not (captions_only and entry.images)] for entries in (known.files, known.by_hand)
    )
    with alone(folder):
        place = Place(dataset, folder)
        lost: list[Failure] = []
        photos: list[Failure] = []
        try:
            lost += fetch_files(files, place, settings)
            todo, wrong = take_in(by_hand, place)
            lost += wrong
            if known.photos is not None and not captions_only:
                photos += fetch_photos(known.photos, place, settings)
        finally:
            place.ledger.flush()
            _write_failures(lost + photos, [entry for entry in by_hand if not place.gives(entry)], place)
    _tell(lost + photos, todo, place)
    later = [] if incomplete else [failure for failure in photos if not failure.gone]
    if lost or todo or later:
        raise DiffcapError(_sentence(lost, todo, later, place))
    return Fetched(
        place.official, frozenset(failure.name.removeprefix("official/") for failure in photos if failure.gone)
    )


def _failures_file(place: Place) -> Path:
    return place.folder / "fetch-failures.json"


def _write_failures(failures: list[Failure], todo: list[Entry], place: Place) -> None:
    if not failures and not todo:
        _failures_file(place).unlink(missing_ok=True)
        return
    rows = {
        "failed": [vars(failure) for failure in failures],
        "by_hand": [
            {"file": entry.file, "page": entry.page, "how": entry.how, "put_into": str(place.target(entry).parent)}
            for entry in todo
        ],
    }
    write_json(_failures_file(place), rows)


def _tell(failures: list[Failure], todo: list[Entry], place: Place) -> None:
    for failure in failures[:_SHOWN]:
        echo(f"not fetched: {failure.name} from {failure.url}: {failure.why}")
    if len(failures) > _SHOWN:
        print(f"not fetched: {len(failures) - _SHOWN:,} more, all in {_failures_file(place)}")
    for entry in todo:
        print(
            f"to be fetched by hand: {entry.file}\n"
            f"  from  {entry.page}\n"
            f"  how   {entry.how}\n"
            f"  into  {place.target(entry).parent}/{', it is unpacked there' if entry.unpack else ''}"
            f" (or put the files themselves into {place.official}: {', '.join(entry.gives)})\n"
            f"  then  make data DATASET={place.dataset}"
        )
    if todo:
        print(f"whoever has the files already: make data DATASET={place.dataset} DATA=<their folder>", flush=True)


def _sentence(lost: list[Failure], todo: list[Entry], later: list[Failure], place: Place) -> str:
    parts = []
    if lost:
        parts.append(f"{_first(lost)} could not be fetched or unpacked")
    if todo:
        named = " and ".join(f"{entry.file} (from {entry.page} into {place.target(entry).parent})" for entry in todo)
        parts.append(f"a person has to fetch {named}")
    if later:
        parts.append(f"photos could not be fetched now, {len(later):,} in all: {_first(later)}")
    skip = ", or go without those photos' pairs: --missing skip" if later and not lost and not todo else ""
    return (
        f"{place.dataset}: {'; '.join(parts)}; then run the same command again, which takes only what is missing "
        f"(all of it is in {_failures_file(place)}){skip}."
    )


def _first(failures: list[Failure]) -> str:
    more = f" and {len(failures) - 1:,} more" if len(failures) > 1 else ""
    return f"{failures[0].name} ({failures[0].why}){more}"
