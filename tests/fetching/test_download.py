"""One file from a server with every fault: it comes whole, or not at all, and what came is not fetched again."""

import hashlib
import io
import random
import resource
import threading
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from multiprocessing.pool import ThreadPool
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
    return Target(target).part


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
@pytest.mark.parametrize("fault", ["cut 70000", "stall 70000"])
@pytest.mark.parametrize("validator", [{"etag": '"one"'}, {"modified": "Mon, 02 Jan 2017 00:00:00 GMT"}])
def test_a_broken_answer_is_continued(site: Site, target: Path, fault: str, validator: dict[str, str]) -> None:
    bring(target, site.put("/file", BODY, faults=[fault, fault], **validator))
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
@pytest.mark.parametrize("fault", ["hang", "drop", "status 500", "status 503", "status 408", "status 429"])
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


def test_a_server_that_gives_no_byte_more_each_time_is_given_up(site: Site, target: Path) -> None:
    with pytest.raises(TransientError, match=r"the connection was closed early \(4 times\)"):
        bring(target, site.put("/file", BODY, always="cut 5000", ranges=False))
    assert site.times("/file") == 4 and not target.exists()


@pytest.mark.slow
@pytest.mark.parametrize("form", ["seconds", "date"])
def test_a_pause_that_the_server_requests_is_made(site: Site, target: Path, form: str) -> None:
    later = format_datetime(datetime.now(UTC) + timedelta(seconds=2), usegmt=True)
    bring(target, site.put("/file", BODY, faults=[f"status 429 Retry-After={'1' if form == 'seconds' else later}"]))
    first, second = (asked.when for asked in site.asked)
    assert whole(target) and second - first > 0.8


def test_cancelling_ends_a_pause(site: Site, target: Path) -> None:
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


def test_content_that_changes_between_two_tries_is_fetched_anew(site: Site, target: Path) -> None:
    url = site.put("/file", BODY, etag='"one"', always="cut 70000", ranges=False)
    with pytest.raises(TransientError):
        bring(target, url)
    fresh = BODY[::-1]
    site.put("/file", fresh, etag='"two"')
    bring(target, url)
    assert whole(target, fresh) and site.asked[-1].range == "bytes=70000-"


@pytest.mark.parametrize("etag", ['"two"', ""])
def test_nor_does_a_server_that_ignores_if_range_mix_two_contents(site: Site, target: Path, etag: str) -> None:
    url = site.put("/file", BODY, etag='"one"', always="cut 70000", ranges=False)
    with pytest.raises(TransientError):
        bring(target, url)
    fresh = BODY[::-1]
    site.put("/file", fresh, etag=etag, always="careless")
    bring(target, url)
    assert whole(target, fresh) and [asked.range for asked in site.asked[-2:]] == ["bytes=70000-", ""]


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


def test_a_part_without_its_metadata_is_nothing(site: Site, target: Path) -> None:
    target.parent.mkdir()
    part_path(target).write_bytes(b"x" * 70000)
    bring(target, site.put("/file", BODY, etag='"one"'))
    assert whole(target) and site.asked[0].range == ""


def test_redirects_are_followed_to_an_end(site: Site, target: Path) -> None:
    site.put("/file", BODY, etag='"one"', faults=["cut 70000"])
    site.put("/b", always="to /file")
    bring(target, site.put("/a", always=f"to {site.url('/b')}"))
    assert whole(target) and [asked.range for asked in site.asked if asked.path == "/file"] == ["", "bytes=70000-"]
    with pytest.raises(PermanentError, match="Exceeded 30 redirects"):
        bring(target, site.put("/loop", always="to /loop"))
    assert site.times("/loop") == 31


@pytest.mark.parametrize("place", ["file:///etc/passwd", "ftp://127.0.0.1/file", "data:text/plain,hello"])
def test_no_redirect_leaves_the_web(site: Site, target: Path, place: str) -> None:
    with pytest.raises(PermanentError, match="the URL cannot be requested") as output:
        bring(target, site.put("/file", always=f"to {place}"))
    assert not output.value.gone and not target.exists() and site.times("/file") == 1


def test_no_redirect_gives_up_encryption(monkeypatch: pytest.MonkeyPatch, target: Path) -> None:
    response = requests.Response()
    response.status_code, response.url, response.raw = 200, "http://127.0.0.1/file", io.BytesIO(BODY)
    monkeypatch.setattr(requests.Session, "get", lambda *words, **more: response)
    with pytest.raises(PermanentError, match=r"redirects to http://127\.0\.0\.1/file, which is not encrypted"):
        bring(target, "https://127.0.0.1/file")
    assert not target.exists()


def test_a_web_page_in_place_of_a_file(site: Site, target: Path) -> None:
    url = site.put("/file", b"<html>please sign in</html>", kind="text/html; charset=utf-8")
    with pytest.raises(PermanentError, match="sends a web page instead of the file"):
        bring(target, url)
    assert list(target.parent.iterdir()) == [] and site.times("/file") == 1


def test_a_file_whose_length_nobody_knows(site: Site, target: Path) -> None:
    with pytest.raises(PermanentError, match="does not send the file's length"):
        bring(target, site.put("/file", BODY, length=False))
    assert not target.exists()


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


def test_the_part_of_another_url_does_not_hide_progress(site: Site, target: Path) -> None:
    failing = site.put("/failing", BODY, always="cut 150000", ranges=False)
    slow = site.put("/slow", BODY, etag='"one"', faults=["cut 20000"] * 6)
    assert bring(target, failing, slow) == slow and whole(target) and site.times("/slow") == 7


def test_a_host_that_is_down_is_not_asked_for_ever(site: Site, tmp_path: Path) -> None:
    site.put("/file", always="drop")
    client = Client(FetchSettings(retries=3, timeout=0.6, backoff=0))
    for n in range(4):
        with pytest.raises(TransientError, match="4 times"):
            bring(tmp_path / str(n), site.url("/file"), client=client)
    with pytest.raises(TransientError, match="is skipped, because the last"):
        bring(tmp_path / "4", site.url("/file"), client=client)
    assert site.times("/file") == 16


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/file", "http://no-such-host.invalid/file"])
def test_nobody_there(target: Path, url: str) -> None:
    with pytest.raises(TransientError) as output:
        bring(target, url, settings=FetchSettings(retries=0, timeout=1, backoff=0))
    assert len(str(output.value)) < 90 and "object at" not in str(output.value)


@pytest.mark.parametrize("url", ["http://a b.invalid:port/file", "http://.invalid/file"])
def test_an_address_that_is_none(target: Path, url: str) -> None:
    with pytest.raises(PermanentError, match="the URL cannot be requested"):
        bring(target, url)


def test_through_a_proxy_of_the_environment(site: Site, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", site.address)
    site.put("http://far-away.invalid/file", BODY)
    bring(target, "http://far-away.invalid/file")
    assert whole(target) and site.asked[0].path == "http://far-away.invalid/file"


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


def test_a_disk_that_takes_only_a_piece_of_the_last_bytes(site: Site, target: Path) -> None:
    url = site.put("/file", BODY, etag='"one"')
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (len(BODY) - 1, limits[1])
    )  # the last write is a short one, without an error
    try:
        with pytest.raises(OSError, match="File too large"):
            bring(target, url)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not target.exists()
    bring(target, url)
    assert whole(target)


@pytest.mark.slow
def test_whatever_happens_every_file_comes_whole(site: Site, tmp_path: Path) -> None:
    chance = random.Random(7)
    faults = ["hang", "drop", "status 500", "status 503", "status 429", "cut", "stall", "careless"]
    bodies = {}
    for n in range(60):
        body = chance.randbytes(chance.choice([0, 1, 900, 5000, 70_000, 150_000]))
        named = chance.choice([{"etag": f'"{n}"'}, {"modified": "Mon, 02 Jan 2017 00:00:00 GMT"}, {}])
        planned = chance.choices(faults, k=chance.randrange(5))
        planned = [
            f"{fault} {chance.randrange(len(body) + 1)}" if fault in ("cut", "stall") else fault for fault in planned
        ]
        site.put(f"/{n}", body, ranges=chance.random() < 0.7, chunked=chance.random() < 0.3, faults=planned, **named)
        bodies[n] = body
    client = Client(FetchSettings(jobs=16, retries=10, timeout=0.5, backoff=0.001))

    def work(n: int) -> str:
        return bring(tmp_path / "files" / str(n), site.url(f"/{n}"), client=client)

    with ThreadPool(16) as pool:
        assert len(pool.map(work, bodies, chunksize=1)) == 60
    assert {int(path.name): path.read_bytes() for path in (tmp_path / "files").iterdir()} == bodies
    assert site.busiest > 8
