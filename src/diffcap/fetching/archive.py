"""Extract an untrusted archive safely: only regular files, only into one folder.

No file is written outside of it, no link or device is made, and archives of implausible size are refused. Members are extracted into
a temporary folder first, so that a damaged or refused archive leaves no file behind.
"""

import errno
import shutil
import tarfile
import zipfile
from pathlib import Path, PurePosixPath

from diffcap.utils.errors import DiffcapError

_MIN_LIMIT = 1 << 30  # bytes; smallest default for the size limit
_MAX_RATIO = 200  # extracted bytes / archive bytes; about 20 for text, 1,000 for zeros
# Errors of the file system that names in an archive cause; others (no space, no permission) are raised unchanged.
_NAME_ERRORS = (errno.EEXIST, errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG)


class _Refused(Exception):
    """The archive cannot be extracted safely; the message is the reason."""


def is_archive(path: Path) -> bool:
    """Return whether a file is a zip file, or begins as a tar file (also .gz, .bz2, .xz); its name does not matter."""
    return tarfile.is_tarfile(path) or zipfile.is_zipfile(path)


def extract(archive: Path, folder: Path, strip: str = "", limit: int | None = None) -> int:
    """Extract a zip or tar file (also .gz, .bz2, .xz; by its content) into a folder; existing files of the same names are replaced.

    Args:
        strip: leading folder to remove from members' names that have it ("data" turns data/a.png into a.png).
        limit: maximum sum of the members' sizes in bytes; by default 200 times the archive's size, but at least 1 GiB.

    Returns:
        Number of extracted files.

    Raises:
        DiffcapError: the archive is damaged or unsafe. No file is extracted.
    """
    limit = max(_MIN_LIMIT, _MAX_RATIO * archive.stat().st_size) if limit is None else limit
    temporary = folder / f".{archive.name}.unpacking"  # on the same disk, so that moving is renaming
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        if tarfile.is_tarfile(archive):
            _extract_tar(archive, temporary, limit)
        else:
            with zipfile.ZipFile(archive) as zip_file:
                _check_size(sum(member.file_size for member in zip_file.infolist()), limit)  # no more bytes are read
                zip_file.extractall(temporary)  # only below the folder; a link becomes a file
        return _move_files(temporary, folder, PurePosixPath(strip))
    except Exception as error:  # the standard library raises many kinds of errors for damaged files
        # None or EINVAL: decompression failed, or the archive has a wrong offset.
        if isinstance(error, OSError) and error.errno not in (*_NAME_ERRORS, None, errno.EINVAL):
            raise
        reason = " ".join(str(error).split()) or type(error).__name__
        # NotImplementedError: unknown compression in a zip file.
        is_refused = isinstance(error, _Refused | tarfile.FilterError | NotImplementedError)
        if is_refused or (isinstance(error, OSError) and error.errno in _NAME_ERRORS):
            fault = f"not extracted ({reason:.200}); get the archive from its publisher, or extract it by hand"
        else:
            fault = f"damaged archive ({reason:.100}); delete it and fetch it again"
        raise DiffcapError(f"{archive}: {fault}.") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _extract_tar(archive: Path, folder: Path, limit: int) -> None:
    total_size = 0

    def check_member(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo:
        nonlocal total_size
        if not member.isreg() and not member.isdir():
            raise _Refused(f"{member.name!r:.100} is a link or a device")
        total_size += abs(member.size)
        _check_size(total_size, limit)
        # Without a mode, the file gets the user's default permissions. Typeshed does not know that None is allowed.
        return tarfile.data_filter(member.replace(mode=None, deep=False), path)  # type: ignore[arg-type]

    with tarfile.open(archive) as package:
        package.extractall(folder, filter=check_member)
        # A tar file ends with two empty blocks. tarfile has read the first, but reports no error if both are missing.
        if package.fileobj is None or not package.fileobj.read(512):
            raise tarfile.ReadError("the end is missing")
        while package.fileobj.read(1 << 20):  # until the checksum at the end of a compressed file is compared
            pass


def _check_size(size: int, limit: int) -> None:
    if size > limit:
        raise _Refused(f"its files have more than {limit:,} bytes, too many for an archive of its size")


def _move_files(source: Path, target: Path, strip: PurePosixPath) -> int:
    """Move all files from one folder into another; returns their number."""
    files = [path for path in source.rglob("*") if path.is_file()]
    if not files:
        raise _Refused("it contains no file")
    for path in files:
        name = PurePosixPath(path.relative_to(source))
        destination = target / (name.relative_to(strip) if strip in name.parents else name)
        destination.parent.mkdir(parents=True, exist_ok=True)
        path.replace(destination)
    return len(files)
