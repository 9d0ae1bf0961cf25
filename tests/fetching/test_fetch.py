"""`stages/data.py` without a source, against a server on this machine: official files, archives, things by hand."""

import hashlib
import io
import json
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from functools import partial

import pytest
import yaml
from tests.commands import environment, in_process
from tests.datasets.layouts import write_clevr_change
from tests.fetching.site import STAGE, Folder

from diffcap.records import read_dataset


@pytest.mark.slow
def test_everything_is_fetched_checked_and_read(clevr: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    clevr.site.pages["/clevr.tar.gz"].faults = ["cut 900"]
    assert clevr.fetch() == ""
    output = capsys.readouterr().out
    assert "licence: CC BY 4.0" in output and "please cite: A. Author. Desks. 2020." in output
    assert "8 pairs" in output and "12 images, all present" in output
    dataset = read_dataset(clevr.out)
    assert dataset.root == clevr.out / "official" and dataset.info["root"] == "official"
    sums = clevr.json("checksums.json")
    assert set(sums) == {"downloads/clevr.tar.gz", "official/splits.json", "official/type_mapping.json"}
    for name, row in sums.items():
        assert row["sha256"] == hashlib.sha256((clevr.out / name).read_bytes()).hexdigest()
    assert not (clevr.out / "fetch-failures.json").exists() and not list(clevr.out.rglob("*.part*"))
    clevr.asked()

    assert clevr.fetch() == "" and clevr.asked() == []  # nothing is missing
    (clevr.out / "downloads/clevr.tar.gz").unlink()
    assert clevr.fetch() == "" and clevr.asked() == []  # it was unpacked
    (clevr.out / "official/splits.json").unlink()
    assert clevr.fetch() == "" and clevr.asked() == ["/splits.json"]
    shutil.rmtree(clevr.out / "official")
    assert clevr.fetch() == "" and clevr.asked() == ["/clevr.tar.gz", "/splits.json", "/types.json"]


def test_what_fails_is_listed_and_only_that_is_fetched_the_next_time(clevr: Folder) -> None:
    clevr.site.pages["/splits.json"].always = "status 500"
    clevr.site.pages["/types.json"].always = "status 404"
    output = clevr.fetch()
    assert output.startswith("error: clevr_change: could not fetch official/") and "then run the same command" in output
    failed = {row["name"]: row for row in clevr.json("fetch-failures.json")["failed"]}
    assert failed["official/splits.json"]["why"] == "the server answers 500 Internal Server Error (3 times)"
    assert failed["official/type_mapping.json"]["why"] == "the server answers 404 Not Found"
    assert not (clevr.out / "manifest.jsonl").exists()
    for page in clevr.site.pages.values():
        page.always = ""
    clevr.asked()
    assert clevr.fetch() == "" and clevr.asked() == ["/splits.json", "/types.json"]
    assert not (clevr.out / "fetch-failures.json").exists()


def test_another_content_than_at_the_first_fetch_is_an_error(clevr: Folder) -> None:
    assert clevr.fetch() == ""
    splits = clevr.out / "official/splits.json"
    body = splits.read_bytes()
    splits.write_bytes(body + b" ")
    assert "its content differs from the checksum in" in clevr.fetch()
    splits.unlink()
    clevr.site.put("/splits.json", body + b"\n")
    output = clevr.fetch()
    assert "at the first fetch; to accept it, delete official/splits.json from" in output
    assert not splits.exists() and not list(clevr.out.rglob("*.part*"))
    sums = clevr.json("checksums.json")
    del sums["official/splits.json"]
    (clevr.out / "checksums.json").write_text(json.dumps(sums))
    assert clevr.fetch() == "" and splits.read_bytes() == body + b"\n"


@pytest.mark.parametrize("algorithm", ["sha256", "md5"])
def test_a_checksum_of_the_publisher_that_does_not_fit(clevr: Folder, algorithm: str) -> None:
    url = clevr.site.url("/splits.json")
    clevr.sources(files=[{"url": url, algorithm: hashlib.new(algorithm, b"other").hexdigest()}])
    assert "the publisher's is" in clevr.fetch() and not (clevr.out / "official/splits.json").exists()
    fits = hashlib.new(algorithm, clevr.site.pages["/splits.json"].body).hexdigest().upper()
    clevr.sources(files=[{"url": url, algorithm: fits}])
    assert "no captions there" in clevr.fetch() and (clevr.out / "official/splits.json").exists()


def test_json_that_is_none_and_an_evil_archive(clevr: Folder) -> None:
    clevr.site.put("/splits.json", b'{"train": [', kind="application/json")
    assert "not valid JSON" in clevr.fetch()
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        archive.addfile(tarfile.TarInfo("../evil.txt"))
    clevr.site.put("/evil.tar.gz", out.getvalue())
    clevr.sources(files=[{"url": clevr.site.url("/evil.tar.gz"), "unpack": True}])
    assert "outside the destination" in clevr.fetch()
    assert not list(clevr.path.rglob("evil.txt"))


def test_a_damaged_archive_is_listed_with_the_rest_and_fetched_again(clevr: Folder) -> None:
    sources = yaml.safe_load((clevr.path / "sources.yaml").read_text())
    del sources["files"][2]["sha256"], sources["files"][2]["size"]
    (clevr.path / "sources.yaml").write_text(yaml.safe_dump(sources))
    page, archive = clevr.site.pages["/clevr.tar.gz"], clevr.out / "downloads/clevr.tar.gz"
    whole, page.body = page.body, page.body[:-400]
    clevr.site.pages["/splits.json"].always = "status 404"
    assert "could not fetch official/splits.json (the server answers 404 Not Found) and 1" in clevr.fetch()
    failed = {row["name"]: row["why"] for row in clevr.json("fetch-failures.json")["failed"]}
    assert set(failed) == {"official/splits.json", "downloads/clevr.tar.gz"}
    reason = failed["downloads/clevr.tar.gz"]
    assert reason.startswith("damaged archive (") and reason.endswith("delete it and fetch it again")
    archive.unlink()
    page.body, page.etag, clevr.site.pages["/splits.json"].always = whole, '"whole"', ""
    clevr.asked()
    assert clevr.fetch() == "" and clevr.asked() == ["/clevr.tar.gz", "/splits.json"] and archive.exists()


def by_hand(clevr: Folder) -> bytes:
    """The archive behind a page that only a person can use; gives its content."""
    body = clevr.site.pages.pop("/clevr.tar.gz").body
    page = {"file": "clevr.tar.gz", "page": "https://drive.invalid/view", "how": "Press the button.", "unpack": True}
    page |= {"strip": "data", "gives": ["images", "sc_images", "nsc_images", "change_captions.json"]}
    sources = yaml.safe_load((clevr.path / "sources.yaml").read_text())
    clevr.sources(files=sources["files"][:2], by_hand=[page])
    return body


def test_what_a_person_has_to_fetch_is_said_precisely(clevr: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    body, output, downloads = by_hand(clevr), clevr.fetch(), clevr.out / "downloads"
    assert f"download by hand clevr.tar.gz from https://drive.invalid/view into {downloads}" in output
    assert "to be downloaded by hand: clevr.tar.gz. How: Press the button." in capsys.readouterr().out
    assert "make data DATA=<folder>" in output
    assert clevr.json("fetch-failures.json")["by_hand"][0]["put_into"] == str(downloads)
    assert clevr.asked() == ["/splits.json", "/types.json"]  # the rest is there already

    (downloads / "clevr.tar.gz").write_bytes(body[:900])  # still being copied
    assert "damaged archive" in clevr.fetch()
    (downloads / "clevr.tar.gz").write_bytes(body)
    assert clevr.fetch() == "" and clevr.asked() == []
    assert len(read_dataset(clevr.out).pairs) == 8 and "downloads/clevr.tar.gz" in clevr.json("checksums.json")


def test_files_that_a_person_unpacked_are_taken_as_they_are(clevr: Folder) -> None:
    body = by_hand(clevr)
    with tarfile.open(fileobj=io.BytesIO(body)) as archive:
        archive.extractall(clevr.path, filter="data")
    shutil.copytree(clevr.path / "data", clevr.out / "official")  # the folder is called data, too
    shutil.rmtree(clevr.out / "official/images")
    (clevr.out / "official/images").mkdir()
    assert "download by hand" in clevr.fetch()
    (clevr.out / "official/images").rmdir()
    shutil.copytree(clevr.path / "data/images", clevr.out / "official/images")
    assert clevr.fetch() == ""


def test_captions_need_no_images(clevr: Folder) -> None:
    made = write_clevr_change(clevr.path / "made", train=[0], val=[1], test=[2])
    files = []
    for name in ("splits", "type_mapping", "change_captions", "no_change_captions"):
        files.append({"url": clevr.site.put(f"/{name}.json", (made / f"{name}.json").read_bytes())})
    page = {"file": "*.zip", "page": "https://drive.invalid", "how": "Press.", "gives": ["images"], "unpack": True}
    clevr.sources(files=files, by_hand=[{**page, "images": True}])
    assert "download by hand *.zip" in clevr.fetch()
    assert clevr.fetch("--captions_only=true") == "" and read_dataset(clevr.out).info["captions_only"]


def start(folder: Folder, option: str) -> subprocess.Popen[str]:
    heed_ctrl_c = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell's background job ignores it
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    words = folder.words(option)
    return subprocess.Popen(words, cwd=folder.path, env=environment(), preexec_fn=heed_ctrl_c, **pipes)


@pytest.mark.slow
def test_killed_at_any_time_it_goes_on_with_what_is_there(clevr: Folder) -> None:
    site, body = clevr.site, clevr.site.pages["/clevr.tar.gz"].body
    size = len(body)
    site.pages["/clevr.tar.gz"].pace = 2 * 1024 / size  # two seconds for all of it
    process = start(clevr, "--fetch.timeout=5")
    part = clevr.out / "downloads/clevr.tar.gz.part"
    deadline = time.monotonic() + 30
    while not (part.exists() and part.stat().st_size > size / 3 and (clevr.out / "official/splits.json").exists()):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    there = part.stat().st_size
    assert 0 < there < size and part.read_bytes() == body[:there]
    assert not (clevr.out / "manifest.jsonl").exists()
    clevr.asked()
    site.pages["/clevr.tar.gz"].pace = 0
    assert clevr.fetch() == ""
    assert [asked.range for asked in site.asked if asked.path == "/clevr.tar.gz"] == [f"bytes={there}-"]
    assert "/splits.json" not in clevr.asked() and len(read_dataset(clevr.out).pairs) == 8


def test_ctrl_c_ends_it_at_once_even_where_a_server_says_nothing(clevr: Folder) -> None:
    clevr.site.pages["/splits.json"].always = "hang"
    process = start(clevr, "--fetch.timeout=300")
    while not clevr.site.times("/splits.json"):
        time.sleep(0.01)
    asked = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, output = process.communicate()
    assert process.returncode == 1 and time.monotonic() - asked < 100  # of 300
    assert output == "error: interrupted; run the same command again, what it has written to files is kept.\n"


def test_without_sources_the_folder_is_asked_for(folder: Folder) -> None:
    words = [sys.executable, STAGE, "--dataset=desk", f"--out={folder.out}"]
    assert "DATASET=desk is unknown; known datasets: " in str(in_process(words))
    words = [sys.executable, STAGE, "--dataset=nabirds", f"--out={folder.out}"]
    assert "download by hand nabirds.tar.gz from https://dl.allaboutbirds.org/nabirds" in str(in_process(words))
    assert "file not found; it must list the dataset's" in str(in_process([*words, "--fetch.sources=nowhere.yaml"]))
