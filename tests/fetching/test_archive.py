"""Untrusted archives: regular files are extracted, and an archive with anything else leaves no file behind."""

import bz2
import gzip
import io
import lzma
import stat
import tarfile
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from diffcap.fetching.archive import extract, is_archive
from diffcap.utils.errors import DiffcapError

FILES = {"data/a.txt": b"first", "data/deep/b.txt": b"second" * 1000, "top.txt": b""}


def tar_bytes(files: dict[str, bytes], *more: tarfile.TarInfo) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name, body in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(body), 0o4777
            archive.addfile(info, io.BytesIO(body))
        for info in more:
            archive.addfile(info)
    return out.getvalue()


def zip_bytes(files: dict[str, bytes], mode: int = 0) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, body in files.items():
            info = zipfile.ZipInfo(name)
            info.external_attr = mode << 16
            archive.writestr(info, body, compress_type=zipfile.ZIP_DEFLATED)
    return out.getvalue()


def tree(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


FORMATS: dict[str, Callable[[dict[str, bytes]], bytes]] = {
    "zip": zip_bytes,
    "tar": tar_bytes,
    "tar.gz": lambda files: gzip.compress(tar_bytes(files)),
    "tar.bz2": lambda files: bz2.compress(tar_bytes(files)),
    "tar.xz": lambda files: lzma.compress(tar_bytes(files)),
}


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_is_extracted(tmp_path: Path, form: str) -> None:
    archive = tmp_path / "archive"  # its content says what it is, not its name
    archive.write_bytes(FORMATS[form](FILES))
    assert is_archive(archive)
    assert extract(archive, tmp_path / "out") == 3 and tree(tmp_path / "out") == FILES
    assert extract(archive, tmp_path / "short", strip_folder="data") == 3
    assert set(tree(tmp_path / "short")) == {"a.txt", "deep/b.txt", "top.txt"}
    mode = (tmp_path / "out/data/a.txt").stat().st_mode
    assert not mode & (stat.S_ISUID | stat.S_IXUSR), "modes are not taken over"


def test_what_is_there_stays_and_the_same_names_are_replaced(tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "data").mkdir(parents=True)
    (out / "data/mine.txt").write_text("mine")
    (out / "data/a.txt").write_text("old")
    (tmp_path / "a.zip").write_bytes(zip_bytes(FILES))
    (out / ".a.zip.unpacking").mkdir()  # of a run that was killed
    (out / ".a.zip.unpacking/half.txt").write_text("half")
    extract(tmp_path / "a.zip", out)
    assert tree(out) == {**FILES, "data/mine.txt": b"mine"}


@pytest.mark.parametrize("form", ["zip", "tar.gz"])
@pytest.mark.parametrize("name", ["../evil.txt", "data/../../evil.txt", "/tmp/evil.txt", "..", "data/.."])
def test_nothing_is_written_outside(tmp_path: Path, form: str, name: str) -> None:
    archive = tmp_path / "evil"
    archive.write_bytes(FORMATS[form]({"good.txt": b"good", name: b"evil"}))
    with suppress(DiffcapError):  # refused, or the libraries have removed the leading part of the name
        extract(archive, tmp_path / "in" / "out", strip_folder="data")
    inside = tmp_path / "in" / "out"
    assert all(path == archive or path.is_relative_to(inside) for path in tmp_path.rglob("*") if path.is_file())
    assert not Path("/tmp/evil.txt").exists()


def with_member(name: str, kind: bytes, link: str = "") -> bytes:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, link
    return tar_bytes({"good.txt": b"good"}, member)


REFUSED = {
    "outside": (tar_bytes({"a": b"a", "../evil": b"b"}), r"'\.\./evil' would be extracted to .*"),
    "link": (with_member("link", tarfile.SYMTYPE, "good.txt"), "'link' is a link or a device"),
    "hard link": (with_member("link", tarfile.LNKTYPE, "/etc/passwd"), "'link' is a link or a device"),
    "pipe": (with_member("pipe", tarfile.FIFOTYPE), "'pipe' is a link or a device"),
    "no file": (zip_bytes({}), "it contains no file"),
    "long name": (zip_bytes({"n" * 300: b"x"}), ".*File name too long.*"),
    "file and folder": (tar_bytes({"a": b"1", "a/b": b"2"}), ".*out.*/a'?"),
}


@pytest.mark.parametrize(("body", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused(tmp_path: Path, body: bytes, reason: str) -> None:
    (tmp_path / "evil").write_bytes(body)
    with pytest.raises(DiffcapError, match=rf"evil: not extracted \({reason}.*\); get the archive from its publisher"):
        extract(tmp_path / "evil", tmp_path / "out")
    assert tree(tmp_path / "out") == {}


def test_a_link_in_a_zip_file_becomes_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.zip").write_bytes(zip_bytes({"link": b"/etc"}, stat.S_IFLNK | 0o777))
    assert extract(tmp_path / "a.zip", tmp_path / "out") == 1 and not (tmp_path / "out/link").is_symlink()


@pytest.mark.parametrize("form", ["zip", "tar.gz"])
def test_a_bomb_is_stopped_early(tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bomb").write_bytes(FORMATS[form]({f"{n}": bytes(300_000) for n in range(4)}))
    monkeypatch.setattr("diffcap.fetching.archive._MIN_LIMIT", 800_000)
    with pytest.raises(DiffcapError, match="its files have more than 800,000 bytes"):
        extract(tmp_path / "bomb", tmp_path / "out")
    assert tree(tmp_path / "out") == {}
    monkeypatch.setattr("diffcap.fetching.archive._MIN_LIMIT", 1_200_000)
    assert extract(tmp_path / "bomb", tmp_path / "out") == 4


@pytest.mark.parametrize("form", FORMATS)
def test_a_cut_archive_leaves_nothing(tmp_path: Path, form: str) -> None:
    body = FORMATS[form]({str(n): bytes([n]) * 5000 for n in range(20)})
    for share in (0.3, 0.9):
        (tmp_path / "cut").write_bytes(body[: int(share * len(body))])
        with pytest.raises(DiffcapError, match=r"damaged archive .*; delete it and fetch it again"):
            extract(tmp_path / "cut", tmp_path / "out")
        assert tree(tmp_path / "out") == {}


def flipped(body: bytes, place: int) -> bytes:
    return body[:place] + bytes([body[place] ^ 255]) + body[place + 1 :]


def with_size(body: bytes, size: bytes) -> bytes:
    """A tar file whose first header has another size, 12 bytes."""
    header = bytearray(body[:512])
    header[124:136] = size
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + body[512:]


DAMAGED = {
    "nothing": b"",
    "a head of gzip": b"\x1f\x8bnonsense",
    "a head of zip": b"PK\x03\x04nonsense",
    "a cut between two members": tar_bytes({"a": b"x" * 512, "b": b"y" * 512})[:1024],
    "a flipped byte": flipped(gzip.compress(tar_bytes({"a": b"x" * 20_000}), 0), 10_000),
    "the end of a bz2 file": flipped(bz2.compress(tar_bytes(FILES)), -3),
    # Added to the sum, it would raise the limit; and tarfile would read the same headers again and again.
    "a negative size": with_size(tar_bytes({"a": b"x"}), (256**12 - 512).to_bytes(12, "big")),
}


@pytest.mark.parametrize("body", DAMAGED.values(), ids=DAMAGED)
def test_whatever_is_damaged_is_one_sentence(tmp_path: Path, body: bytes) -> None:
    (tmp_path / "bad").write_bytes(body)
    with pytest.raises(DiffcapError, match=r"bad: damaged archive \(.+\); delete it and fetch it again"):
        extract(tmp_path / "bad", tmp_path / "out")
    assert tree(tmp_path / "out") == {}
