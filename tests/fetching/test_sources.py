from pathlib import Path

import pytest

from diffcap.datasets.registry import datasets
from diffcap.fetching.sources import read_sources
from diffcap.utils.errors import DiffcapError

SOURCES = Path(__file__).parents[2] / "configs/sources"
TOP = "name: Desk\npage: https://desk.invalid\nlicence: none\ncitation: nobody\n"


@pytest.mark.parametrize("path", sorted(SOURCES.glob("*.yaml")), ids=lambda path: path.stem)
def test_ours_are_complete(path: Path) -> None:
    sources = read_sources(path)
    assert sources.files or sources.by_hand
    text = path.read_text()
    assert text.startswith("# ") and f"make data DATASET={path.stem}" in text and "not tried here" in text
    for entry in (*sources.files, *sources.by_hand):
        assert entry.url.startswith("https://") or entry.page.startswith("https://")
        assert entry.gives or not entry.unpack


def test_there_is_one_for_every_published_dataset() -> None:
    published = {name for name, spec in datasets().items() if not spec.rendered}
    assert published == {path.stem for path in SOURCES.iterdir()}


def test_names_come_from_the_address(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(f"{TOP}files:\n- url: https://desk.invalid/some%20file.json?download=1\n")
    assert [entry.file for entry in read_sources(tmp_path / "a.yaml").files] == ["some file.json"]


@pytest.mark.parametrize(
    "text, complaint",
    [
        ("a: [", "not YAML"),
        ("- a", "not a list of sources"),
        ("name: Desk", "missing 3 required positional arguments: 'page', 'licence', and 'citation'"),
        (TOP + "fils: []", "not a list of sources"),
        (TOP + "files: [{urk: a}]", r"the entry {'urk': 'a'} lacks url"),
        (TOP + "files: [{url: 'https://desk.invalid/a', siz: 1}]", "unexpected keyword argument 'siz'"),
        (TOP + "files: [{url: 'file:///etc/passwd'}]", "is not an http or https address"),
        (TOP + "files: [{url: 'https://desk.invalid/'}]", "file must be the name of a file"),
        (TOP + "files: [{url: 'https://desk.invalid/a', to: ../b}]", "must be a path inside the dataset's folder"),
        (TOP + "by_hand: [{file: a.zip}]", "lacks page, how, gives"),
        (TOP + "photos: {mirrors: [desk]}", "is not an http or https address"),
    ],
)
def test_faults_get_one_sentence(tmp_path: Path, text: str, complaint: str) -> None:
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(DiffcapError, match=complaint) as output:
        read_sources(tmp_path / "a.yaml")
    assert str(output.value).startswith(str(tmp_path / "a.yaml"))
