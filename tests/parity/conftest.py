from pathlib import Path

import pytest
from tests.parity.loading import FIXTURES, find


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`pcl_fixture` runs over every IDC-PCL fixture of the folder, whatever its name and dimensions."""
    if "pcl_fixture" in metafunc.fixturenames:
        folder = Path(metafunc.config.getoption("--parity-dir", default=None) or FIXTURES)
        paths = find(folder, "pcl", single_image=None)
        assert paths, f"no IDC-PCL fixture in {folder}"
        metafunc.parametrize("pcl_fixture", paths, ids=[path.stem for path in paths])
