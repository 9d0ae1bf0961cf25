"""A badly behaved web server for every test, and no proxy between it and us."""

from collections.abc import Iterator

import pytest
from tests.fetching.site import Site, served


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def site() -> Iterator[Site]:
    with served() as site:
        yield site
