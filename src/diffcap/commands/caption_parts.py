"""Parts of a Parquet table of image pairs. Each part is captioned independently, so any program can distribute the parts."""

import io
import posixpath
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from diffcap.utils.cores import map_ahead
from diffcap.utils.errors import DiffcapError, wrap_errors
from diffcap.utils.files import atomic_write, existing_path

if TYPE_CHECKING:
    from diffcap.pair_captioner import PairCaptioner

Rows = list[dict[str, Any]]  # of a table: column -> value
SIDES = ("before", "after")
ACCESS = "cannot be accessed", "check the path or URL, and that you have access to it"  # arguments of wrap_errors
STRING_TYPES = "string", "large_string", "dictionary<values=string"  # beginnings of the names of pyarrow's types
MAX_REQUESTS = 64  # images that are requested at the same time
RETRY_SECONDS = [1.0, 4.0]  # pauses before the second and the third request for an image
SENTENCES = pa.list_(pa.struct({"text": pa.string(), "log_probability": pa.float64()}))
# Column -> type. All written files have the columns `PAIR`. Files of captions also have `SCORES` and `DETAILS`.
PAIR = {"row": pa.int64(), "id": pa.string(), "before": pa.string(), "after": pa.string()}
SCORES = {"caption": pa.string(), "log_probability": pa.float64(), "nothing_changed": pa.float64()}
DETAILS = {"notes": pa.list_(pa.string()), "words": SENTENCES, "alternatives": SENTENCES}


class TableFile(NamedTuple):
    """A Parquet file of a table."""

    path: str  # absolute, or a URL
    size: int  # bytes
    rows: int


class Part(NamedTuple):
    """Consecutive rows of one file of a table."""

    number: int  # index of the part in the table
    file: str  # absolute path, or a URL
    start: int  # the first row's number in the file
    size: int  # number of rows
    row: int  # the first row's number in the table

    @property
    def name(self) -> str:
        """Name of the part's file of captions, and of its file of failed pairs."""
        return f"part-{self.number:08d}.parquet"


@dataclass(frozen=True)
class Job:
    """What is equal for all parts: `out` (folder or URL of the results), options of `diffcap caption`, and threads that read images."""

    out: str
    beam: int = 1
    length_penalty: float = 0.0
    batch_size: int = 16
    threads: int = 1


def list_files(table: str) -> list[TableFile]:
    """Return the Parquet files of a table. `table` is the path or URL of one file, or of a folder of files. Only footers are read.

    Raises:
        DiffcapError: a file cannot be read or lacks a column of strings `before` or `after`, or the table has no row.
    """
    remedy = "give a table with the columns before and after, which hold paths or URLs as strings"

    def read_footer(path: str) -> TableFile:
        location = system.unstrip_protocol(path).removeprefix("file://")
        with wrap_errors(location, "not a table of pairs", remedy), system.open(path) as stream:
            footer = pq.ParquetFile(stream)
            types = {field.name: str(field.type) for field in footer.schema_arrow}
            strings = {name for name, kind in types.items() if kind.startswith(STRING_TYPES)}
            if missing := [side for side in SIDES if side not in strings]:
                raise DiffcapError(f'{location}: has no column "{missing[0]}" of strings; {remedy}.')
            return TableFile(location, system.size(path), footer.metadata.num_rows)

    with wrap_errors(table, *ACCESS), ThreadPoolExecutor(16) as pool:
        system, path = fsspec.url_to_fs(table)
        if not system.exists(path):
            raise DiffcapError(f"{table}: not found; give a .parquet file or a folder of them.")
        names = [path] if system.isfile(path) else sorted(system.ls(path, detail=False))
        files = list(pool.map(read_footer, (name for name in names if name == path or name.endswith(".parquet"))))
    if not any(file.rows for file in files):
        raise DiffcapError(
            f"{table}: it contains no pair; give a .parquet file, or a folder of them, with a row per pair."
        )
    return files


def split(files: Sequence[TableFile], part_size: int) -> list[Part]:
    """Return the parts of a table. Each has `part_size` rows; the last part of a file may have fewer."""
    parts: list[Part] = []
    first_row = 0
    for file in files:
        for start in range(0, file.rows, part_size):
            count = min(part_size, file.rows - start)
            parts.append(Part(len(parts), file.path, start, count, first_row + start))
        first_row += file.rows
    return parts


def read_rows(part: Part) -> Rows:
    """Return the rows of a part, each with "row" (its number in the table), "id", "before" and "after".

    Only the row groups of these rows are read. Paths of images that are relative to the table's folder become absolute.
    """
    with wrap_errors(part.file, *ACCESS), fsspec.open(part.file) as stream:
        file = pq.ParquetFile(stream)
        columns = [name for name in ("id", *SIDES) if name in file.schema_arrow.names]
        row_groups = range(file.num_row_groups)
        starts = [0, *accumulate(file.metadata.row_group(group).num_rows for group in row_groups)]
        first, end = bisect_right(starts, part.start) - 1, bisect_left(starts, part.start + part.size)
        groups = file.read_row_groups([*row_groups[first:end]], columns)
        rows: Rows = groups.slice(part.start - starts[first], part.size).to_pylist()
    folder = part.file.rpartition("/")[0]
    for number, row in enumerate(rows, part.row):
        for side in SIDES:
            name = row[side] or ""
            row[side] = name if not name or "://" in name else posixpath.join(folder, name)
        row |= {"row": number, "id": str(number if row.get("id") is None else row["id"])}
    return rows


def fetch(location: str) -> Path | bytes | DiffcapError:
    """Return the path of a local image, the content of an image at a URL, or an error.

    If the network or the server fails (HTTP status 429, or 500 and more), the image is requested up to two more times.

    Raises:
        DiffcapError: the package that opens URLs of this kind is not installed.
    """
    if not location:
        return DiffcapError("the path of an image is missing; every row needs before and after.")
    if "://" not in location:
        return existing_path(Path(location))
    fault = ""
    for pause in (0.0, *RETRY_SECONDS):
        time.sleep(pause)
        try:
            system, name = fsspec.url_to_fs(location)
            content: bytes = system.cat_file(name)
            return content
        except ImportError as error:
            raise DiffcapError(f"{location}: {error}; install the package that opens such URLs.") from None
        except Exception as error:  # each file system of fsspec raises other errors
            fault = "not found" if isinstance(error, FileNotFoundError) else str(error) or type(error).__name__
            status = getattr(error, "status", 500)
            is_final = isinstance(error, (FileNotFoundError, PermissionError, IsADirectoryError, ValueError))
            if is_final or (status < 500 and status != 429):
                break
    return DiffcapError(f"{location}: cannot be fetched ({' '.join(fault.split())[:200]}); check the URL.")


def caption_part(captioner: "PairCaptioner", job: Job, part: Part) -> tuple[int, int]:
    """Caption a part and write its files: pairs that cannot be captioned to the folder `job.out`/failed, the others to `job.out`.

    The file in `job.out` is written last, because it marks the part as complete. Both files depend only on the arguments.

    Returns:
        The number of captioned pairs, and the number of failed pairs.
    """
    torch.set_num_threads(1)  # the last digits of a probability can depend on the number of threads
    rows = read_rows(part)
    faults: dict[int, DiffcapError] = {}  # number of a row in the table -> error
    captioned: Rows = []
    failed: Rows = []

    def images(pool: ThreadPoolExecutor) -> Iterator[tuple[Any, Any]]:
        sources = map_ahead(pool, fetch, (row[side] for row in rows for side in SIDES), 2 * job.batch_size)
        for row, before, after in zip(rows, sources, sources):
            if errors := [source for source in (before, after) if isinstance(source, DiffcapError)]:
                faults[row["row"]] = errors[0]
                before = after = b""  # the pair keeps its place, so that its batch has the same other pairs
            yield before, after

    with ThreadPoolExecutor(min(MAX_REQUESTS, 2 * job.batch_size)) as pool:
        options = job.beam, job.length_penalty, job.batch_size
        captions = captioner.batch(images(pool), *options, errors="return", threads=job.threads)
        for row, caption in zip(rows, captions, strict=True):
            if isinstance(caption, DiffcapError):
                failed.append({**row, "error": str(faults.get(row["row"], caption))})
            else:
                captioned.append({**row, "caption": caption.text, **caption.as_dict()})
    failed_file = f"{job.out}/failed/{part.name}"
    if failed:
        _write_table(failed_file, failed, {**PAIR, "error": pa.string()})
    elif part.name in list_names(f"{job.out}/failed"):  # an interrupted command wrote it
        system, name = fsspec.url_to_fs(failed_file)
        system.rm_file(name)
    _write_table(f"{job.out}/{part.name}", captioned, {**PAIR, **SCORES, **DETAILS})
    return len(captioned), len(failed)


def _write_table(location: str, rows: Rows, columns: dict[str, Any]) -> None:
    content = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows, pa.schema(columns)), content, compression="zstd")
    write_file(location, content.getvalue())


def list_names(folder: str) -> set[str]:
    """Return the names of the files in a folder or at a URL; an empty set if it does not exist."""
    with wrap_errors(folder, *ACCESS):
        system, path = fsspec.url_to_fs(folder)
        system.invalidate_cache()
        return {PurePosixPath(name).name for name in system.ls(path, detail=False)} if system.exists(path) else set()


def write_file(location: str, content: bytes) -> None:
    """Write a file completely or not at all: a local file by renaming a temporary file, a URL in one request."""
    if "://" not in location:
        with atomic_write(location) as temporary:
            temporary.write_bytes(content)
        return
    with wrap_errors(location, *ACCESS):
        system, name = fsspec.url_to_fs(location)
        system.pipe_file(name, content)
