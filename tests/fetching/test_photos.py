"""`stages/data.py` without a source, against a server on this machine: photos by their addresses."""

import pytest
from tests.fetching.site import Folder

from diffcap.records import read_dataset

pytestmark = pytest.mark.slow  # a web server


def failed(birds: Folder) -> dict[str, tuple[str, bool]]:
    return {row["name"]: (row["why"], row["gone"]) for row in birds.json("fetch-failures.json")["failed"]}


def test_photos_by_address(birds: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    assert birds.fetch() == ""
    images = sorted(path.name for path in (birds.out / "official/images").iterdir())
    assert images == [f"{n}.jpg" for n in range(1, 7)]
    assert "photos: 6 of 6 exist, 6 of them are new; 0 no longer exist online" in capsys.readouterr().out
    dataset = read_dataset(birds.out)
    assert len(dataset.pairs) == 5 and dataset.info["skipped"] == {"pairs": 0, "images": 0}
    assert len(birds.json("checksums.json")) == 7
    birds.asked()
    assert birds.fetch() == "" and birds.asked() == []
    (birds.out / "official/images/3.jpg").unlink()
    assert birds.fetch() == "" and birds.asked() == ["/photos/3"]


def test_dead_photos_are_listed_and_their_pairs_dropped(birds: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    site = birds.site
    whole = site.pages["/photos/2"].body
    site.pages["/photos/1"].always = "status 404"
    site.pages["/photos/6"].always = "status 410"
    assert birds.fetch() == ""
    assert failed(birds) == {
        "official/images/1.jpg": ("the server answers 404 Not Found", True),
        "official/images/6.jpg": ("the server answers 410 Gone", True),
    }
    output = capsys.readouterr().out
    assert "2 no longer exist" in output and "2 of 5 pairs are unusable" in output and "2 pairs skipped" in output
    dataset = read_dataset(birds.out)
    assert dataset.info["skipped"] == {"pairs": 2, "images": 2}
    assert [pair.id for pair in dataset.pairs] == ["2_3", "3_4", "4_5"]
    birds.asked()

    site.put("/photos/1", whole, kind="image/jpeg")
    site.put("/photos/6", whole[: len(whole) // 2], kind="image/jpeg")  # cut on the server's own disk
    assert birds.fetch() == "" and birds.asked() == ["/photos/1", "/photos/6"]
    assert list(failed(birds)) == ["official/images/6.jpg"] and failed(birds)["official/images/6.jpg"][1]
    assert "broken" in failed(birds)["official/images/6.jpg"][0]
    site.put("/photos/6", b"<html>lies about its kind</html>", kind="image/jpeg")
    assert birds.fetch() == "" and failed(birds) == {
        "official/images/6.jpg": ("broken: a text file, not an image; put an image in its place", True)
    }
    assert not (birds.out / "official/images/6.jpg").exists() and not list(birds.out.rglob("*.part*"))


def test_photos_that_fail_only_now_lose_no_pair_unless_told_to(birds: Folder) -> None:
    birds.site.pages["/photos/1"].always = "status 503"
    birds.site.pages["/photos/6"].always = "status 404"
    output = birds.fetch()
    assert "could not fetch official/images/1.jpg (" in output and "more" not in output and "--missing skip" in output
    assert failed(birds)["official/images/1.jpg"] == ("the server answers 503 Service Unavailable (3 times)", False)
    assert not (birds.out / "manifest.jsonl").exists()
    assert birds.fetch("--missing=skip") == "" and len(read_dataset(birds.out).pairs) == 3
    birds.site.pages["/photos/1"].always = ""
    assert birds.fetch() == "" and len(read_dataset(birds.out).pairs) == 4


def test_a_forbidden_photo_is_gone_where_its_host_hands_out_others(birds: Folder) -> None:
    site = birds.site
    site.pages["/photos/6"].always = "status 403"
    assert birds.fetch() == "" and len(read_dataset(birds.out).pairs) == 4
    assert failed(birds)["official/images/6.jpg"] == ("the server answers 403 Forbidden", True)
    birds.asked()
    assert birds.fetch() == "" and birds.asked() == ["/photos/3", "/photos/6"]  # one that it gave before is asked for
    for n in range(1, 6):
        site.pages[f"/photos/{n}"].always = "status 403"  # the host has shut us out
    assert "could not fetch official/images/6.jpg (" in birds.fetch()
    assert failed(birds)["official/images/6.jpg"] == ("the server answers 403 Forbidden", False)


def test_a_page_to_log_in_loses_no_pair(birds: Folder) -> None:
    photos = {path: page.body for path, page in birds.site.pages.items() if path.startswith("/photos/")}

    def hide(*paths: str) -> None:
        for path in paths:
            birds.site.put(path, b"<html>log in to the hotel's network</html>", kind="text/html")

    for count in (1, 4, len(photos)):  # a wall may stand before some of them only
        hide(*list(photos)[-count:])
        for photo in (birds.out / "official/images").glob("*.jpg"):
            photo.unlink()
        expected = birds.fetch()
        assert expected.startswith("error: birds2words: could not fetch official/") and "--missing skip" in expected
        assert list(failed(birds).values()) == [("the server sends a web page instead of the file", False)] * count
        assert not (birds.out / "manifest.jsonl").exists()
    for path, body in photos.items():
        birds.site.put(path, body, kind="image/jpeg")
    assert birds.fetch() == "" and len(read_dataset(birds.out).pairs) == 5


@pytest.mark.parametrize(("status", "gone"), [(404, True), (403, True), (401, False)])
def test_a_forbidden_photo_needs_a_clear_no_of_the_mirror_too(birds: Folder, status: int, gone: bool) -> None:
    birds.site.pages["/photos/6"].always = "status 403"
    birds.site.put("/mirror/photos/6", always=f"status {status}")
    birds.sources(files=[{"url": birds.site.url("/birds.tsv")}], photos={"mirrors": [birds.site.url("/mirror/")]})
    assert bool(birds.fetch()) is not gone
    assert failed(birds)["official/images/6.jpg"] == ("the server answers 403 Forbidden", gone)


@pytest.mark.parametrize(
    ("url", "name"),
    [("ftp://127.0.0.1/photos/6", "6"), ("http://[half/photos/6", "6"), ("http://[half/x.jpg", "x"), ("photos/6", "6")],
)
def test_an_address_in_the_table_that_is_none(birds: Folder, url: str, name: str) -> None:
    page = birds.site.pages["/birds.tsv"]
    page.body = page.body.replace(birds.site.url("/photos/6").encode(), url.encode())
    assert birds.fetch() == ""
    assert failed(birds) == {f"official/images/{name}.jpg": ("the annotations give no web address for it", True)}
