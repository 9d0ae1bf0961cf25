"""Options that point tests at files outside the repository; without them the tests that need such files do not exist."""

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--parity-dir", default=None, help="folder of parity fixtures to use in place of the committed ones"
    )
    parser.addoption(
        "--oracle-dir", default=None, help="folder of published predictions, references and expected scores to score"
    )
    parser.addoption(
        "--chromium", default=None, help="a Chromium to look at the page with, whose chromedriver is beside it"
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if collection_path.name == "test_oracle.py" and config.getoption("--oracle-dir") is None:
        return True
    if collection_path.name == "test_browser.py" and config.getoption("--chromium") is None:
        return True
    return None
