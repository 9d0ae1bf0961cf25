"""A server of the page for the tests of a module, and a visitor of it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.web.site import Visitor, visited


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("uploaded")


@pytest.fixture(scope="module")
def visitor(folder: Path) -> Iterator[Visitor]:
    with visited(folder) as visitor:
        yield visitor
