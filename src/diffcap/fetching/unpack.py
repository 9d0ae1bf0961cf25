"""Taking an archive of a stranger's apart: plain files below one folder, and nothing else.

Refused, before a member of that kind is written: absolute names, names that lead out with "..", links, devices, encrypted
members, and archives that grow out of all proportion. Only names and contents are taken over, never modes or owners. The
members go into a folder of their own first, so that an archive that turns out damaged leaves nothing behind.
"""

import bz2
import errno
import gzip
import lzma
import shutil
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple, TypeVar

from diffcap.errors import DiffcapError

_PIECE = 1 << 20
_RATIO = 200  # text packs to a twentieth or so, zeros to a thousandth
_ALWAYS = 1 << 30  # bytes that any archive may hold
_MEMBERS = 2_000_000
_BLOCK = 512  # of a tar file
# What the standard library's readers raise on malformed files, theirs and whatever else they stumble over.
_MALFORMED = (
    *(tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error, EOFError),
    *(ValueError, ArithmeticError, LookupError, RuntimeError),
)
_OPENERS: tuple[tuple[bytes, Any], ...] = ((b"\x1f\x8b", gzip.open), (b"BZh", bz2.open), (b"\xfd7zXZ\0", lzma.open))

Entry = TypeVar("Entry")


class Evil(Exception):
    """The archive holds what no data set needs."""


class Damaged(DiffcapError):
    """The archive is not as its publisher made it: the same file may be whole when it is fetched again."""


class Member(NamedTuple):
    """One file of an archive: its name, and its content to be read before the next one is asked for."""

    name: str
    content: IO[bytes]


def is_archive(path: Path) -> bool:
    """Whether a file begins like a zip file or a tar file, packed or not; says nothing of its end."""
    with path.open("rb") as file:
        head = file.read(_BLOCK)
    return (
        head.startswith((b"PK\x03\x04", b"PK\x05\x06", *(magic for magic, _ in _OPENERS))) or head[257:262] == b"ustar"
    )


def unpack(archive: Path, folder: Path, strip: str = "", limit: int | None = None) -> int:
    """Unpack a zip or tar file (also .gz, .bz2, .xz) into a folder, whose files of the same names it replaces.

    Args:
        archive: the file; its content says what it is.
        folder: made if it is not there.
        strip: a leading folder to take off the members' names, where they have it ("data" makes data/a.png a.png).
        limit: bytes that the members may have together, and again that a tar file may have in all; 200 times the archive's
            size, at least a gigabyte, by default.

    Returns:
        How many files were in it.

    Raises:
        Damaged: a damaged archive; nothing of it is left then.
        DiffcapError: no archive, or one that is refused; nothing of it is left either.
    """
    room = max(_ALWAYS, _RATIO * archive.stat().st_size) if limit is None else limit
    # Beside its goal, and so on the same disk: moving is renaming then.
    folder.mkdir(parents=True, exist_ok=True)
    aside = folder / f".{archive.name}.unpacking"
    shutil.rmtree(aside, ignore_errors=True)
    try:
        count = _pour(_members(archive, room), aside, PurePosixPath(strip), room)
        if not count:
            raise Evil("it holds no file")
        _merge(aside, folder)
    except (Evil, NotImplementedError, MemoryError) as error:
        reason = " ".join(str(error).split()) or "it asks for more memory than there is"
        raise DiffcapError(
            f"{archive}: not unpacked, {reason}; fetch it from its publisher, or unpack it by hand."
        ) from None
    except _MALFORMED as error:
        raise _damaged(archive, error) from None
    except OSError as error:
        if error.errno not in (None, errno.EINVAL):  # the disk's, and not the decoder's or of a seek to nowhere
            raise
        raise _damaged(archive, error) from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return count


def _damaged(archive: Path, error: Exception) -> Damaged:
    reason = " ".join(str(error).split()) or type(error).__name__
    return Damaged(f"{archive}: a damaged archive ({reason:.100}); delete it and fetch it again.")


def _pour(members: Iterator[Member], aside: Path, strip: PurePosixPath, room: int) -> int:
    count = 0
    for member in members:
        count += 1
        target = aside / _inside(member.name, strip)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("wb") as file:
                while piece := member.content.read(_PIECE):
                    room -= len(piece)
                    if room < 0:
                        raise Evil("its files are larger than any such archive should hold")
                    file.write(piece)
        except (FileExistsError, NotADirectoryError, IsADirectoryError):
            raise Evil(f"{member.name!r:.100} is a file in one place and a folder in another") from None
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:
                raise
            raise Evil(f"{member.name!r:.100} is too long a name") from None
    return count


def _inside(name: str, strip: PurePosixPath) -> PurePosixPath:
    path = PurePosixPath(name)
    # A backslash or a colon means something elsewhere only, but no data set has a use for them.
    if path.is_absolute() or ".." in path.parts or not path.parts or any(sign in name for sign in "\\:\0"):
        raise Evil(f"{name!r:.100} would be written outside its folder")
    if strip.parts and path.parts[: len(strip.parts)] == strip.parts and len(path.parts) > len(strip.parts):
        path = PurePosixPath(*path.parts[len(strip.parts) :])
    return path


def _members(archive: Path, room: int) -> Iterator[Member]:
    with archive.open("rb") as file:
        head = file.read(_BLOCK)
    if head.startswith(b"PK"):
        yield from _zip_members(archive)
    elif is_archive(archive):
        yield from _tar_members(archive, head, room)
    else:
        raise Evil("it is neither a zip nor a tar file")


def _counted(entries: Iterable[Entry]) -> Iterator[Entry]:
    """The same, files and folders, as long as they are not too many."""
    for count, entry in enumerate(entries, 1):
        if count > _MEMBERS:
            raise Evil(f"it holds more than {_MEMBERS:,} files and folders")
        yield entry


def _zip_members(archive: Path) -> Iterator[Member]:
    with zipfile.ZipFile(archive) as package:
        for info in _counted(package.infolist()):
            kind = stat.S_IFMT(info.external_attr >> 16)
            if info.flag_bits & 1:
                raise Evil(f"{info.filename!r:.100} is encrypted")
            if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
                raise Evil(f"{info.filename!r:.100} is a link or a device")
            if info.is_dir():
                continue
            try:
                with package.open(info) as content:
                    yield Member(info.filename, content)
            except NotImplementedError as error:
                raise Evil(f"{info.filename!r:.100} is packed in an unknown way ({error})") from None


class _Watched:
    """A tar file that gives no more than so many bytes, in pieces, and remembers the last one.

    Contents are asked for in pieces, so a large one is of a header, which tarfile reads whole, whatever size it claims. Of a file
    that is cut between two members, tarfile sees the end, and the last piece tells.
    """

    def __init__(self, file: IO[bytes], room: int):
        self.file, self.room, self.last = file, room, b""

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= _PIECE:
            raise Evil(f"one of its headers says that it is {size:,} bytes long")
        self.last = self.file.read(size)
        self.room -= len(self.last)
        if self.room < 0:
            raise Evil("it is larger than any such archive should be")
        return self.last

    def seek(self, *where: int) -> int:
        return self.file.seek(*where)

    def tell(self) -> int:
        return self.file.tell()


def _tar_members(archive: Path, head: bytes, room: int) -> Iterator[Member]:
    with _opened(archive, head, room) as file, tarfile.open(fileobj=file, mode="r:") as package:  # type: ignore[call-overload]
        for info in _counted(package):
            if info.isdir():
                continue
            content = package.extractfile(info) if info.isreg() else None
            if content is None:
                raise Evil(f"{info.name!r:.100} is a link or a device")
            yield Member(info.name, content)
        if file.last != bytes(_BLOCK):
            raise tarfile.ReadError("it ends in the middle")
        while file.read(_PIECE):  # a packed file has its checksum at the end
            pass


@contextmanager
def _opened(archive: Path, head: bytes, room: int) -> Iterator[_Watched]:
    opener = next((opener for magic, opener in _OPENERS if head.startswith(magic)), open)
    with opener(archive, "rb") as file:
        yield _Watched(file, room)


def _merge(source: Path, target: Path) -> None:
    """Move every file to its place by renaming it; a second run after a kill repeats that."""
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir()):
        goal = target / path.name
        if path.is_dir() and goal.is_dir():
            _merge(path, goal)
        elif path.is_dir() is goal.is_dir() or not goal.exists():
            path.replace(goal)
        else:
            raise Evil(f"{goal} is there already, and is a {'folder' if goal.is_dir() else 'file'}")
