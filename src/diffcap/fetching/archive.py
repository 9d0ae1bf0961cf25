"""Extract an untrusted archive safely: only regular files are written, and only into one folder.

Links, devices, paths outside of the folder, and archives of implausible size are refused. The files are extracted into a temporary
folder first, so that a damaged or refused archive leaves no file behind.
"""

import errno
import shutil
import tarfile
import zipfile
from pathlib import Path, PurePosixPath

from diffcap.utils.errors import DiffcapError, one_line

_MIN_LIMIT = 1 << 30  # extracted bytes that are allowed for an archive of any size
# Errors of the file system that are caused by the names in an archive. Other OSErrors, such as a full disk, are raised unchanged.
_NAME_ERRORS = (errno.EEXIST, errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG)


class _Refused(Exception):
    """The archive cannot be extracted safely; the message is the reason."""


def is_archive(path: Path) -> bool:
    """Return True if a file is a zip file, or begins like a tar file (also .gz, .bz2, .xz); the file's name does not matter."""
    return tarfile.is_tarfile(path) or zipfile.is_zipfile(path)


def extract(archive: Path, folder: Path, strip_folder: str = "") -> int:
    """Extract a zip or tar file (also .gz, .bz2, .xz) of any name into a folder, replacing existing files; return the number of files.

    Args:
        strip_folder: leading folder to remove from the names of members ("data" turns data/a.png into a.png).

    Raises:
        DiffcapError: the archive is damaged or unsafe. No file is extracted.
    """
    size_limit = max(_MIN_LIMIT, 200 * archive.stat().st_size)  # the ratio is about 20 for text, 1,000 for zeros
    temporary_folder = folder / f".{archive.name}.unpacking"  # on the same disk, so that renaming can move the files
    shutil.rmtree(temporary_folder, ignore_errors=True)
    temporary_folder.mkdir(parents=True)
    try:
        if tarfile.is_tarfile(archive):
            _extract_tar(archive, temporary_folder, size_limit)
        else:
            with zipfile.ZipFile(archive) as zip_file:
                _check_size(sum(member.file_size for member in zip_file.infolist()), size_limit)
                # zipfile writes only into this folder, makes no links, and writes at most `file_size` bytes of each member.
                zip_file.extractall(temporary_folder)
        files = [path for path in temporary_folder.rglob("*") if path.is_file()]
        if not files:
            raise _Refused("it contains no file")
        for file in files:
            name = PurePosixPath(file.relative_to(temporary_folder))
            target_file = folder / (
                name.relative_to(strip_folder) if PurePosixPath(strip_folder) in name.parents else name
            )
            target_file.parent.mkdir(parents=True, exist_ok=True)
            file.replace(target_file)
        return len(files)
    except Exception as error:  # the standard library raises many kinds of errors for damaged files
        # A damaged archive can also cause an OSError: the errno is None if decompression fails, EINVAL if an offset is wrong.
        if isinstance(error, OSError) and error.errno not in (*_NAME_ERRORS, None, errno.EINVAL):
            raise
        reason = one_line(error)
        # zipfile raises NotImplementedError for a compression method that it does not know.
        is_refused = isinstance(error, _Refused | tarfile.FilterError | NotImplementedError)
        if is_refused or (isinstance(error, OSError) and error.errno in _NAME_ERRORS):
            fault = f"not extracted ({reason}); get the archive from its publisher, or extract it by hand"
        else:
            fault = f"damaged archive ({reason:.100}); delete it and fetch it again"
        raise DiffcapError(f"{archive}: {fault}.") from None
    finally:
        shutil.rmtree(temporary_folder, ignore_errors=True)


def _extract_tar(archive: Path, folder: Path, size_limit: int) -> None:
    total_size = 0

    def check_member(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo:
        nonlocal total_size
        if not member.isreg() and not member.isdir():
            raise _Refused(f"{member.name!r:.100} is a link or a device")
        total_size += abs(member.size)
        _check_size(total_size, size_limit)
        # With mode=None, the file gets the user's default permissions. The type stubs do not allow None, but tarfile does.
        return tarfile.data_filter(member.replace(mode=None, deep=False), path)  # type: ignore[arg-type]

    with tarfile.open(archive) as tar_file:
        tar_file.extractall(folder, filter=check_member)
        # A tar file ends with two empty blocks. tarfile reads the first block, but it raises no error if both blocks are missing.
        if tar_file.fileobj is None or not tar_file.fileobj.read(512):
            raise tarfile.ReadError("the end is missing")
        while tar_file.fileobj.read(1 << 20):  # reading to the end of a compressed file compares its checksum
            pass


def _check_size(size: int, size_limit: int) -> None:
    if size > size_limit:
        raise _Refused(f"its files have more than {size_limit:,} bytes, too many for an archive of its size")
