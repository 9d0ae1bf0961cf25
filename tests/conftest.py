"""Options that point tests at files outside the repository; without them the tests that need such files do not exist."""

import os
from pathlib import Path

import pytest
from tests import preloaded

# Every core has a worker: with torch's own choice of threads they would wait for each other. Before any test imports torch.
os.environ.setdefault("OMP_NUM_THREADS", "1")
preloaded.install()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--parity-dir", default=None, help="folder of parity fixtures instead of the committed ones")
    parser.addoption(
        "--real-dir", default=None, help="folder of official files (clevr_change/, spot_the_diff/, ...) to count"
    )
    parser.addoption("--oracle-dir", default=None, help="folder of published predictions, references and scores")
    parser.addoption(
        "--write-golden", action="store_true", help="write the files of tests/golden again from what is found now"
    )
    parser.addoption("--chromium", default=None, help="path of Chromium; chromedriver must be in the same folder")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    needed = {"test_oracle.py": "--oracle-dir", "test_real.py": "--real-dir", "test_browser.py": "--chromium"}.get(
        collection_path.name
    )
    return True if needed and config.getoption(needed) is None else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in tests/stages runs real commands, and whatever is thorough is slow.

    Slow tests run first, so that the others fill the end; those of a file have one process, for its fixtures.
    """
    stages = Path(__file__).parent / "stages"
    for item in items:
        if item.path.is_relative_to(stages) or item.get_closest_marker("thorough"):
            item.add_marker("slow")
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.xdist_group(str(item.path)))
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
