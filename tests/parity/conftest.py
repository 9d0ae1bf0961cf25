from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.parity.loading import FIXTURES, find

# A test that takes one of these runs over every such fixture of the folder, whatever its name and dimensions.
KINDS: dict[str, tuple[tuple[str, ...], dict[str, bool | None]]] = {
    "pcl_fixture": (("pcl",), {"single_image": None}),
    "pcl_single_fixture": (("pcl",), {"single_image": True}),
    "scorer_fixture": (("scorer",), {}),
    "dirl_fixture": (("dirl",), {}),
    "views_fixture": (("scorer", "dirl"), {}),
    "clip4idc_fixture": (("clip4idc",), {}),
    "rsiccformer_fixture": (("rsiccformer",), {}),
    "chg2cap_fixture": (("chg2cap",), {}),
    "remote_sensing_fixture": (("rsiccformer", "chg2cap"), {}),
}


@pytest.fixture(autouse=True)
def float32_products() -> Iterator[None]:
    """The authors trained with float32 matrix products; a training in the same process may have switched TF32 on."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    folder = Path(metafunc.config.getoption("--parity-dir", default=None) or FIXTURES)
    if not any(find(folder, *methods, **conditions) for methods, conditions in KINDS.values()):
        raise pytest.UsageError(f"--parity-dir: {folder} holds no fixture of {', '.join(KINDS)}; see tests/parity")
    for name in KINDS.keys() & set(metafunc.fixturenames):
        methods, conditions = KINDS[name]
        paths = find(folder, *methods, **conditions)
        # A folder given on the command line may hold one system's fixtures only.
        assert paths or folder != FIXTURES, f"no fixture for {name} in {folder}"
        metafunc.parametrize(name, paths, ids=[path.stem for path in paths])
