"""One file from a server with every fault: it comes whole, or not at all, and what came is not fetched again."""

import hashlib
import io
import random
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import requests
from tests.fetching.site import Site

from diffcap.fetching.download import Cancelled, Client, PermanentError, Target, TransientError, download
from diffcap.fetching.sources import FetchSettings

BODY = random.Random(1).randbytes(200_000)
QUICK = FetchSettings(retries=3, timeout=0.6, backoff=0.01, patience=5)


def bring(
    target: Path, *urls: str, settings: FetchSettings = QUICK, client: Client | None = None, **options: object
) -> str:
    return download(urls, Target(target, **options), client or Client(settings))  # type: ignore[arg-type]


def part_path(target: Path) -> Path:
    return Target(target).part_file


def whole(target: Path, body: bytes = BODY) -> bool:
    """The file is there, and nothing else is."""
    return target.read_bytes() == body and [path.name for path in target.parent.iterdir()] == [target.name]


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "new folder" / "file.bin"


@pytest.mark.parametrize("chunked", [False, True])
def test_a_file_comes_whole(site: Site, target: Path, chunked: bool) -> None:
    url = site.put("/file", BODY, chunked=chunked)
    assert bring(target, url) == url
    assert whole(target) and site.asked[0].agent.startswith("diffcap/")


@pytest.mark.slow
@pytest.mark.parametrize("validator", [{"etag": '"one"'}, {"modified": "Mon, 02 Jan 2017 00:00:00 GMT"}])
def test_a_broken_answer_is_continued(site: Site, target: Path, validator: dict[str, str]) -> None:
    faults = ["cut 70000", "stall 70000"]
    bring(target, site.put("/file", BODY, faults=faults, **validator))
    assert whole(target) and [asked.range for asked in site.asked] == ["", "bytes=70000-", "bytes=140000-"]
    assert site.asked[1].if_range == next(iter(validator.values())) and site.sent == len(BODY)


@pytest.mark.parametrize(
    ("page", "second"),
    [
        ({"modified": "Mon, 02 Jan 2017 00:00:00 GMT", "terse": True}, "bytes=70000-"),
        ({"chunked": True, "etag": '"one"'}, "bytes=70000-"),
        ({"ranges": False, "etag": '"one"'}, "bytes=70000-"),
        ({"etag": ""}, ""),  # nothing tells whether the content is still the same
        ({"etag": 'W/"one"'}, ""),
    ],
)
def test_a_cut_answer_is_continued_if_the_content_is_known(
    site: Site, target: Path, page: dict[str, object], second: str
) -> None:
    bring(target, site.put("/file", BODY, faults=["cut 70000"], **page))
    assert whole(target) and [asked.range for asked in site.asked] == ["", second]


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["hang", "drop", "status 500", "status 429"])
def test_passing_faults_are_tried_again(site: Site, target: Path, fault: str) -> None:
    bring(target, site.put("/file", BODY, faults=[fault, fault]))
    assert whole(target) and site.times("/file") == 3


def test_progress_starts_the_count_of_retries_anew(site: Site, target: Path) -> None:
    body = BODY * 4
    bring(target, site.put("/file", body, etag='"one"', faults=["cut 70000"] * 10))
    assert whole(target, body) and site.times("/file") == 11 and site.sent == len(body)


def test_retries_end_and_the_part_stays_for_the_next_run(site: Site, target: Path) -> None:
    url = site.put("/file", BODY, etag='"one"', faults=["cut 70000", *["status 503"] * 4])
    with pytest.raises(TransientError, match=r"503 Service Unavailable \(4 times\)"):
        bring(target, url)
    assert not target.exists() and part_path(target).read_bytes() == BODY[:70000]
    bring(target, url)
    assert whole(target) and site.asked[-1].range == "bytes=70000-"


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("http://127.0.0.1:1/file", TransientError),
        ("http://a b.invalid:port/file", PermanentError),
        ("file:///etc/passwd", PermanentError),
    ],
)
def test_an_address_without_a_file(site: Site, target: Path, url: str, kind: type[Exception]) -> None:
    for each in (url, site.put("/file", always=f"to {url}")):
        with pytest.raises(kind, match="URL cannot be requested" if kind is PermanentError else "refused") as output:
            bring(target, each, settings=FetchSettings(retries=0, timeout=1, backoff=0))
        assert not target.exists() and len(str(output.value)) < 120


def test_a_pause_that_the_server_requests_is_made_until_it_is_cancelled(site: Site, target: Path) -> None:
    url = site.put("/file", BODY, faults=["status 429 Retry-After=60"])
    client = Client(replace(QUICK, patience=100))
    begin = time.monotonic()
    threading.Timer(0.3, client.cancelled.set).start()
    with pytest.raises(Cancelled):
        bring(target, url, client=client)
    assert time.monotonic() - begin < 30 and site.times("/file") == 1


def test_a_server_that_asks_for_too_long_a_pause_is_left_for_later(site: Site, target: Path) -> None:
    with pytest.raises(TransientError, match="the server answers 503 Service Unavailable, try again in 3,600 seconds"):
        bring(target, site.put("/file", BODY, faults=["status 503 Retry-After=3600"]))
    assert site.times("/file") == 1


@pytest.mark.parametrize("status, gone", [(404, True), (410, True), (401, False), (403, False), (400, False)])
def test_a_clear_no_is_not_asked_again(site: Site, target: Path, status: int, gone: bool) -> None:
    with pytest.raises(PermanentError, match=f"the server answers {status}") as output:
        bring(target, site.put("/file", always=f"status {status}"))
    assert output.value.gone is gone and output.value.forbidden is (status == 403)
    assert site.times("/file") == 1 and not target.exists()


@pytest.mark.parametrize(
    ("page", "ranges"),
    [
        ({"etag": '"two"'}, ["bytes=70000-"]),
        ({"etag": '"two"', "always": "careless"}, ["bytes=70000-", ""]),  # a server that ignores If-Range
        ({"etag": "", "always": "careless"}, ["bytes=70000-", ""]),
    ],
)
def test_content_that_changes_between_two_tries_is_fetched_anew(
    site: Site, target: Path, page: dict[str, str], ranges: list[str]
) -> None:
    url = site.put("/file", BODY, etag='"one"', always="cut 70000", ranges=False)
    with pytest.raises(TransientError):
        bring(target, url)
    site.put("/file", BODY[::-1], **page)
    site.asked.clear()
    bring(target, url)
    assert whole(target, BODY[::-1]) and [asked.range for asked in site.asked] == ranges


def test_with_a_checksum_anything_is_continued_and_a_bad_fit_begun_anew(site: Site, target: Path) -> None:
    url = site.put("/file", BODY, faults=["cut 70000"])
    right = hashlib.sha256(BODY).hexdigest()

    def check(path: Path) -> str:
        return "" if hashlib.sha256(path.read_bytes()).hexdigest() == right else "another checksum"

    bring(target, url, verify=check, has_checksum=True)
    assert whole(target) and site.asked[-1].range == "bytes=70000-"
    target.unlink()
    site.pages["/file"].faults = ["cut 70000"]
    with pytest.raises(TransientError):
        bring(target, url, verify=check, has_checksum=True, settings=FetchSettings(retries=0, timeout=0.3))
    part_path(target).write_bytes(b"x" * 70000)
    bring(target, url, verify=check, has_checksum=True)
    assert whole(target) and [asked.range for asked in site.asked[-2:]] == ["bytes=70000-", ""]


@pytest.mark.parametrize(
    ("part", "ranges"),
    [
        (BODY, []),  # killed between the last byte and the name: the length is in the metadata
        (BODY + b"more", [f"bytes={len(BODY) + 4}-", ""]),
    ],
)
def test_a_part_that_is_not_what_came(site: Site, target: Path, part: bytes, ranges: list[str]) -> None:
    url = site.put("/file", BODY, etag='"one"', always="cut 70000")
    with pytest.raises(TransientError):
        bring(target, url, settings=FetchSettings(retries=0, timeout=0.3))
    part_path(target).write_bytes(part)
    site.pages["/file"].always = ""
    site.asked.clear()
    bring(target, url)
    assert whole(target) and [asked.range for asked in site.asked] == ranges


def test_redirects_are_followed_to_an_end(site: Site, target: Path) -> None:
    site.put("/file", BODY, etag='"one"', faults=["cut 70000"])
    site.put("/b", always="to /file")
    bring(target, site.put("/a", always=f"to {site.url('/b')}"))
    assert whole(target) and [asked.range for asked in site.asked if asked.path == "/file"] == ["", "bytes=70000-"]
    with pytest.raises(PermanentError, match="Exceeded 30 redirects"):
        bring(target, site.put("/loop", always="to /loop"))
    assert site.times("/loop") == 31


def test_no_redirect_gives_up_encryption(monkeypatch: pytest.MonkeyPatch, target: Path) -> None:
    response = requests.Response()
    response.status_code, response.url, response.raw = 200, "http://127.0.0.1/file", io.BytesIO(BODY)
    monkeypatch.setattr(requests.Session, "get", lambda *words, **more: response)
    with pytest.raises(PermanentError, match=r"redirects to http://127\.0\.0\.1/file, which is not encrypted"):
        bring(target, "https://127.0.0.1/file")
    assert not target.exists()


@pytest.mark.parametrize(
    ("page", "fault"),
    [
        ({"kind": "text/html; charset=utf-8"}, "sends a web page instead of the file"),
        ({"length": False}, "does not send the file's length"),
    ],
)
def test_an_answer_that_cannot_be_the_whole_file(site: Site, target: Path, page: dict[str, object], fault: str) -> None:
    with pytest.raises(PermanentError, match=fault):
        bring(target, site.put("/file", BODY, **page))
    assert list(target.parent.iterdir()) == [] and site.times("/file") == 1


def test_the_next_address_where_the_first_has_no_such_file(site: Site, target: Path) -> None:
    gone, there = site.put("/gone", always="status 404"), site.put("/there", BODY)
    assert bring(target, gone, there) == there and whole(target)
    forbidden = site.put("/forbidden", always="status 403")
    with pytest.raises(PermanentError, match="404") as output:
        bring(target, gone, forbidden)
    assert output.value.gone
    with pytest.raises(PermanentError, match="403") as output:
        bring(target, forbidden, gone)
    assert not output.value.gone and output.value.forbidden
    with pytest.raises(PermanentError, match="403") as output:
        bring(target, forbidden, site.put("/sign-in", always="status 401"))
    assert not output.value.gone and not output.value.forbidden  # the other may have it


def test_the_next_address_where_the_first_does_not_answer(site: Site, target: Path) -> None:
    there, gone = site.put("/there", BODY), site.put("/gone", always="status 404")
    client = Client(FetchSettings(retries=3, timeout=0.6, backoff=0))
    for _ in range(5):  # the fifth time the first host counts as down
        assert bring(target, "http://127.0.0.1:1/file", there, client=client) == there and whole(target)
        target.unlink()
    with pytest.raises(TransientError, match="is skipped, because the last"):
        bring(target, "http://127.0.0.1:1/file", gone, client=client)
    failing = site.put("/failing", BODY, etag='"one"', always="cut 70000", ranges=False)
    with pytest.raises(TransientError, match="closed early"):
        bring(target, failing, gone)
    assert part_path(target).read_bytes() == BODY[:70000]  # for the next time


def test_a_full_disk_is_an_error_that_names_the_file(site: Site, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = site.put("/file", BODY, etag='"one"')
    target.parent.mkdir()
    part_path(target).symlink_to("/dev/full")
    with monkeypatch.context() as patch:
        patch.setattr(Target, "delete_part", lambda target: None)
        with pytest.raises(OSError, match="No space left on device") as output:
            bring(target, url)
    assert output.value.filename == str(part_path(target)) and not target.exists()
    bring(target, url)
    assert whole(target)
