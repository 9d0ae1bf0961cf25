"""Where a test of the data stage fetches to."""

import json
import sys
from pathlib import Path

import yaml
from tests.commands import ROOT, in_process
from tests.fetching.site import Site

STAGE = str(ROOT / "stages/data.py")
QUICK = ("--fetch.timeout=1", "--fetch.backoff=0.01", "--fetch.retries=2")
TOP = {"name": "Desk", "page": "https://desk.invalid", "licence": "CC BY 4.0", "citation": "A. Author. Desks. 2020."}


class Folder:
    """Where one test fetches to."""

    def __init__(self, path: Path, site: Site):
        self.path, self.site, self.dataset = path, site, "clevr_change"

    @property
    def out(self) -> Path:
        return self.path / "data"

    def words(self, *options: str) -> list[str]:
        named = f"--dataset={self.dataset}", f"--out={self.out}", f"--fetch.sources={self.path / 'sources.yaml'}"
        return [sys.executable, STAGE, *named, *QUICK, *options]

    def sources(self, **more: object) -> None:
        (self.path / "sources.yaml").write_text(yaml.safe_dump({**TOP, **more}))

    def fetch(self, *options: str) -> str:
        """Run the stage in this process; the sentence with which it stopped, "" where it went well."""
        return str(in_process(self.words(*options)) or "")

    def json(self, name: str) -> dict:
        return json.loads((self.out / name).read_text())

    def asked(self) -> list[str]:
        """The paths that were asked for since the last call."""
        paths = [asked.path for asked in self.site.asked]
        self.site.asked.clear()
        return sorted(paths)
