"""Extract an untrusted archive safely: regular files below one folder, and nothing else.

The standard library keeps every member inside the folder. Links, devices, encrypted members and archives of implausible size
are refused. Members are extracted into a temporary folder first, so that a damaged archive leaves no file behind.
"""

import errno
import shutil
import stat
import tarfile
import zipfile
from pathlib import Path, PurePosixPath

from diffcap.utils.errors import DiffcapError

_BLOCK = 512  # bytes of a tar header
_CHUNK = 1 << 20
_MIN_LIMIT = 1 << 30  # bytes that the members of any archive may have
_MAX_RATIO = 200  # text compresses to about 5%, zeros to 0.1%
_MAX_MEMBERS = 2_000_000
_MAGIC = (b"PK\x03\x04", b"PK\x05\x06", b"\x1f\x8b", b"BZh", b"\xfd7zXZ\0")
# Errors of the file system that the names in an archive cause; others (no space, no permission) are not the archive's.
_NAME_ERRORS = (errno.EEXIST, errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG)


class UnsafeArchive(Exception):
    """The archive holds something that no dataset needs."""


class DamagedArchive(DiffcapError):
    """The archive is incomplete or corrupt; another download may repair it."""


def is_archive(path: Path) -> bool:
    """Whether a file begins like a zip or tar file, compressed or not. The end of the file is not checked."""
    with path.open("rb") as file:
        head = file.read(_BLOCK)
    return head.startswith(_MAGIC) or head[257:262] == b"ustar"


def extract(archive: Path, folder: Path, strip: str = "", limit: int | None = None) -> int:
    """Extract a zip or tar file (also .gz, .bz2, .xz) into a folder; existing files of the same names are replaced.

    Args:
        archive: the file; its content decides the format, not its name.
        folder: created if it does not exist.
        strip: leading folder to remove from members' names that have it ("data" turns data/a.png into a.png).
        limit: maximal sum of the members' sizes in bytes; 200 times the archive's size, at least 1 GiB, by default.

    Returns:
        Number of extracted files.

    Raises:
        DamagedArchive: the archive is damaged.
        DiffcapError: the file is not an archive, or an unsafe one. No file is extracted in either case.
    """
    limit = max(_MIN_LIMIT, _MAX_RATIO * archive.stat().st_size) if limit is None else limit
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{archive.name}.unpacking"  # on the same disk, so that moving is renaming
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        if not is_archive(archive):
            raise UnsafeArchive("it is neither a zip nor a tar file")
        with archive.open("rb") as file:
            is_zip = file.read(2) == b"PK"
        (_extract_zip if is_zip else _extract_tar)(archive, temporary, limit)
        return _move_files(temporary, folder, PurePosixPath(strip))
    except (UnsafeArchive, tarfile.FilterError, NotImplementedError) as error:
        raise _refused(archive, error) from None
    except OSError as error:
        if error.errno in _NAME_ERRORS:
            raise _refused(archive, error) from None
        if error.errno not in (None, errno.EINVAL):
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


class _Budget:
    """Limits the number of members and the sum of their sizes."""

    def __init__(self, limit: int):
        self.bytes, self.members = limit, _MAX_MEMBERS

    def spend(self, size: int) -> None:
        self.bytes, self.members = self.bytes - size, self.members - 1
        if self.members < 0:
            raise UnsafeArchive(f"it holds more than {_MAX_MEMBERS:,} files and folders")
        if self.bytes < 0:
            raise UnsafeArchive("its files are larger than any such archive should hold")


def _extract_zip(archive: Path, folder: Path, limit: int) -> None:
    budget = _Budget(limit)
    with zipfile.ZipFile(archive) as package:
        for info in package.infolist():
            if info.flag_bits & 1:
                raise UnsafeArchive(f"{info.filename!r:.100} is encrypted")
            if ".." in PurePosixPath(info.filename).parts:
                raise UnsafeArchive(f"the path {info.filename!r:.100} contains '..'")
            if stat.S_IFMT(info.external_attr >> 16) not in (0, stat.S_IFREG, stat.S_IFDIR):
                raise UnsafeArchive(f"{info.filename!r:.100} is a link or a device")
            budget.spend(info.file_size)  # zipfile reads no more than this
        package.extractall(folder)


def _extract_tar(archive: Path, folder: Path, limit: int) -> None:
    budget = _Budget(limit)

    def check(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo:
        if not member.isreg() and not member.isdir():
            raise UnsafeArchive(f"{member.name!r:.100} is a link or a device")
        budget.spend(member.size)
        return tarfile.data_filter(member.replace(mode=None, deep=False), path)  # type: ignore[arg-type]

    with tarfile.open(archive) as package:
        package.extractall(folder, filter=check)
        # A tar file ends with two empty blocks. tarfile has read the first, and does not notice if both are missing.
        if package.fileobj is None or not package.fileobj.read(_BLOCK):
            raise tarfile.ReadError("the end is missing")
        while package.fileobj.read(_CHUNK):  # compressed files have a checksum at their end
            pass


def _move_files(source: Path, target: Path, strip: PurePosixPath) -> int:
    """Move all files from one folder into another; returns their number."""
    files = [path for path in sorted(source.rglob("*")) if path.is_file()]
    if not files:
        raise UnsafeArchive("it holds no file")
    for path in files:
        name = PurePosixPath(path.relative_to(source))
        if strip in name.parents:
            name = name.relative_to(strip)
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        path.replace(target / name)
    return len(files)
