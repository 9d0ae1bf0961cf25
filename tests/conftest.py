"""Options that point tests at files outside the repository; without them the tests that need such files do not exist."""

import os
from pathlib import Path
from typing import Any

import pytest
from tests import preloaded

# Every core has a worker: with torch's own choice of threads they would wait for each other. Before any test imports torch.
os.environ.setdefault("OMP_NUM_THREADS", "1")
preloaded.install()
# Paths of tests whose files begin with trainings and the like, which all their tests use.
SHARED_FIXTURES = ("tests/stages/", "tests/golden/", "tests/test_adding.py", "tests/test_experiment.py")


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

    Slow tests run first, so that the others fill the end.
    """
    stages = Path(__file__).parent / "stages"
    for item in items:
        if item.path.is_relative_to(stages) or item.get_closest_marker("thorough"):
            item.add_marker("slow")
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """The tests of a file with expensive fixtures have one process; others are distributed one by one."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return file if file.startswith(SHARED_FIXTURES) else nodeid

    return Scheduling(config, log)
