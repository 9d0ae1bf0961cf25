"""Extract an untrusted archive safely: regular files below one folder, and nothing else.

Links, devices, encrypted members, paths that lead out of the folder, and archives of implausible size are refused. Members are
extracted into a temporary folder first, so that a damaged or refused archive leaves no file behind.
"""

import errno
import shutil
import stat
import tarfile
import zipfile
from pathlib import Path, PurePosixPath
from typing import Literal, Self

from diffcap.utils.errors import DiffcapError

_BLOCK = 512  # bytes of a tar header
_CHUNK = 1 << 20
_MIN_LIMIT = 1 << 30  # bytes; the default size limit is never below it
_MAX_RATIO = 200  # extracted bytes / archive bytes; about 20 for text, 1,000 for zeros
_MAX_MEMBERS = 2_000_000
_MAX_HEADER = 1 << 20  # bytes of metadata of one tar member
_METADATA_TYPES = (
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
)
_ZIP_MAGIC = (b"PK\x03\x04", b"PK\x05\x06")
_TAR_MAGIC = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ\0")  # gzip, bzip2, xz; an uncompressed tar file has "ustar" at byte 257
# File system errors that are caused by the names in an archive; others (no space, no permission) are raised unchanged.
_NAME_ERRORS = (errno.EEXIST, errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG)


class UnsafeArchive(Exception):
    """The archive cannot be extracted safely; the message is the reason. `extract` raises a `DiffcapError` in its place."""


class DamagedArchive(DiffcapError):
    """The archive is incomplete or corrupt; downloading it again may help."""


def is_archive(path: Path) -> bool:
    """Whether the first bytes are those of a zip file, or of a tar file (also .gz, .bz2, .xz); the rest is not checked."""
    return _archive_type(path) is not None


def _archive_type(path: Path) -> Literal["zip", "tar"] | None:
    with path.open("rb") as file:
        head = file.read(_BLOCK)
    if head[257:262] == b"ustar":  # checked first: the first member's name may begin like a zip file
        return "tar"
    return "zip" if head.startswith(_ZIP_MAGIC) else "tar" if head.startswith(_TAR_MAGIC) else None


def extract(archive: Path, folder: Path, strip: str = "", limit: int | None = None) -> int:
    """Extract a zip or tar file (also .gz, .bz2, .xz) into a folder; existing files of the same names are replaced.

    Args:
        archive: the file; its content decides the format, not its name.
        folder: created if it does not exist.
        strip: leading folder to remove from members' names that have it ("data" turns data/a.png into a.png).
        limit: maximum sum of the members' sizes in bytes; by default 200 times the archive's size, but at least 1 GiB.

    Returns:
        Number of extracted files.
    """
    limit = max(_MIN_LIMIT, _MAX_RATIO * archive.stat().st_size) if limit is None else limit
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{archive.name}.unpacking"  # on the same disk, so that moving is renaming
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        archive_type = _archive_type(archive)
        if archive_type is None:
            raise UnsafeArchive("it is neither a zip nor a tar file")
        (_extract_zip if archive_type == "zip" else _extract_tar)(archive, temporary, limit)
        return _move_files(temporary, folder, PurePosixPath(strip))
    except (
        UnsafeArchive,
        tarfile.FilterError,
        NotImplementedError,
    ) as error:  # the last: unknown compression in a zip file
        raise _refused(archive, error) from None
    except OSError as error:
        if error.errno in _NAME_ERRORS:
            raise _refused(archive, error) from None
        if error.errno not in (None, errno.EINVAL):  # these two: decompression failed, or a wrong offset in the archive
            raise
        raise _damaged(archive, error) from None
    except Exception as error:  # the readers of the standard library raise many kinds of errors on damaged files
        raise _damaged(archive, error) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _refused(archive: Path, error: Exception) -> DiffcapError:
    reason = " ".join(str(error).split())
    return DiffcapError(
        f"{archive}: not extracted ({reason:.200}); get the archive from its publisher, or extract it by hand."
    )


def _damaged(archive: Path, error: Exception) -> DamagedArchive:
    reason = " ".join(str(error).split()) or type(error).__name__
    return DamagedArchive(f"{archive}: damaged archive ({reason:.100}); delete it and fetch it again.")


class _SizeLimit:
    """Limits the number of members and the sum of their sizes in bytes."""

    def __init__(self, limit: int):
        self.limit, self.size, self.members = limit, 0, 0

    def add(self, size: int) -> None:
        if size < 0:  # a tar file can say so
            raise UnsafeArchive(f"a file has {size:,} bytes")
        self.size, self.members = self.size + size, self.members + 1
        if self.members > _MAX_MEMBERS:
            raise UnsafeArchive(f"it holds more than {_MAX_MEMBERS:,} files and folders")
        if self.size > self.limit:
            raise UnsafeArchive(f"its files have more than {self.limit:,} bytes, too many for an archive of its size")


def _extract_zip(archive: Path, folder: Path, limit: int) -> None:
    size_limit = _SizeLimit(limit)
    with zipfile.ZipFile(archive) as package:
        for info in package.infolist():
            if info.flag_bits & 1:
                raise UnsafeArchive(f"{info.filename!r:.100} is encrypted")
            if ".." in PurePosixPath(info.filename).parts:  # zipfile would remove it, and extract to another path
                raise UnsafeArchive(f"the path {info.filename!r:.100} contains '..'")
            if stat.S_IFMT(info.external_attr >> 16) not in (0, stat.S_IFREG, stat.S_IFDIR):
                raise UnsafeArchive(f"{info.filename!r:.100} is a link or a device")
            size_limit.add(info.file_size)  # zipfile reads no more than this
        package.extractall(folder)


class _TarHeader(tarfile.TarInfo):
    """A tar header that refuses too much metadata (a long name, pax records) before tarfile reads it into memory."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        header = super().frombuf(buf, encoding, errors)
        if header.type in _METADATA_TYPES and not 0 <= header.size <= _MAX_HEADER:
            raise UnsafeArchive(f"a header has {header.size:,} bytes; at most {_MAX_HEADER:,} are read")
        return header


def _extract_tar(archive: Path, folder: Path, limit: int) -> None:
    size_limit = _SizeLimit(limit)

    def check(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo:
        if not member.isreg() and not member.isdir():
            raise UnsafeArchive(f"{member.name!r:.100} is a link or a device")
        size_limit.add(member.size)
        # Without a mode, the file gets the user's default permissions. Typeshed does not know that None is allowed.
        return tarfile.data_filter(member.replace(mode=None, deep=False), path)  # type: ignore[arg-type]

    with tarfile.open(archive, tarinfo=_TarHeader) as package:
        package.extractall(folder, filter=check)
        # A tar file ends with two empty blocks. tarfile has read the first, and does not notice if both are missing.
        if package.fileobj is None or not package.fileobj.read(_BLOCK):
            raise tarfile.ReadError("the end is missing")
        while package.fileobj.read(
            _CHUNK
        ):  # compressed files have a checksum at their end, which is checked when it is read
            pass


def _move_files(source: Path, target: Path, strip: PurePosixPath) -> int:
    """Move all files from one folder into another; returns their number. All names are checked before the first file is moved."""
    moves: dict[Path, Path] = {}
    for path in sorted(source.rglob("*")):
        if not path.is_file():
            continue
        name = PurePosixPath(path.relative_to(source))
        goal = target / (name.relative_to(strip) if strip in name.parents else name)
        if goal in moves:
            raise UnsafeArchive(f"two of its files would be extracted to {str(goal)!r}")
        moves[goal] = path
    if not moves:
        raise UnsafeArchive("it holds no file")
    for parent in {parent for goal in moves for parent in goal.parents}:
        if parent in moves or parent.is_file():
            raise UnsafeArchive(f"it needs a folder {str(parent)!r}, which is a file")
    for goal in moves:
        if goal.is_dir():
            raise UnsafeArchive(f"it holds a file {str(goal)!r}, which is a folder")
    for goal, path in moves.items():
        goal.parent.mkdir(parents=True, exist_ok=True)
        path.replace(goal)
    return len(moves)
