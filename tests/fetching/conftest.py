"""A badly behaved web server for every test, no proxy between it and us, and two datasets on it."""

import hashlib
import io
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.datasets.layouts import BIRD_COLUMNS, bird_row, write_clevr_change, write_image
from tests.fetching.site import Folder, Site, served


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def site() -> Iterator[Site]:
    with served() as site:
        yield site


@pytest.fixture
def folder(tmp_path: Path, site: Site) -> Folder:
    return Folder(tmp_path, site)


@pytest.fixture
def clevr(folder: Folder, site: Site) -> Folder:
    """CLEVR-Change as one archive and two files beside it."""
    official = write_clevr_change(folder.path / "made", train=[0, 1], val=[2], test=[3])
    site.put("/splits.json", (official / "splits.json").read_bytes(), etag='"s"')
    site.put("/types.json", (official / "type_mapping.json").read_bytes(), etag='"t"')
    for name in ("splits.json", "type_mapping.json"):
        (official / name).unlink()
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        archive.add(official, arcname="data")
    body = out.getvalue()
    site.put("/clevr.tar.gz", body, etag='"c"')
    shutil.rmtree(official)
    folder.sources(
        files=[
            {"url": site.url("/splits.json")},
            {"url": site.url("/types.json"), "file": "type_mapping.json"},
            {
                "url": site.url("/clevr.tar.gz"),
                "sha256": hashlib.sha256(body).hexdigest(),
                "size": len(body),
                "unpack": True,
                "strip": "data",
                "gives": ["images", "sc_images", "nsc_images", "change_captions.json", "no_change_captions.json"],
            },
        ]
    )
    return folder


@pytest.fixture
def birds(folder: Folder, site: Site) -> Folder:
    """Birds-to-Words with six photos, of which five pairs are made."""
    folder.dataset = "birds2words"
    rows = [
        bird_row("1", "2", "train", "Animal 1 is red."),
        bird_row("1", "2", "train", "Animal 2 is blue.", 2),
        bird_row("2", "3", "train", "Animal 1 is big."),
        bird_row("3", "4", "val", "Animal 1 is small."),
        bird_row("4", "5", "test", "Animal 1 has a beak."),
        bird_row("5", "6", "test", "Animal 2 has a beak."),
    ]
    table = "\t".join(BIRD_COLUMNS) + "\n" + "\n".join(rows) + "\n"
    table = table.replace("https://www.inaturalist.org/photos/", site.url("/photos/"))
    folder.sources(files=[{"url": site.put("/birds.tsv", table.encode(), kind="text/plain")}], photos={})
    for n in range(1, 7):
        write_image(folder.path / "made.jpg", n)
        site.put(f"/photos/{n}", (folder.path / "made.jpg").read_bytes(), kind="image/jpeg")
    return folder
