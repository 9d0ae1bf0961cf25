import errno
import json
from pathlib import Path
from typing import Any

import pytest

from diffcap.scenes.partial import PartialResults
from diffcap.utils.errors import DiffcapError

HEADER = {"tile": 256, "before": ["a.tif", 10]}


def test_batches_come_back_without_the_line_that_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "new" / "x.partial.jsonl"
    with PartialResults(path, HEADER) as partial:
        assert partial.batches == []
        for batch in ([{"tile": 0}], [{"tile": 1, "caption": "é"}]):
            partial.append(batch)
    with path.open("a") as file:
        file.write('[{"tile": 2')
    for _ in range(2):
        with PartialResults(path, HEADER) as partial:
            assert partial.batches == [[{"tile": 0}], [{"tile": 1, "caption": "é"}]]
    with PartialResults(path, HEADER) as partial:
        partial.append([])
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        HEADER,
        [{"tile": 0}],
        [{"tile": 1, "caption": "é"}],
        [],
    ]


def test_results_of_another_run_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "x.partial.jsonl"
    PartialResults(path, HEADER).append([1])
    content = path.read_bytes()
    with pytest.raises(DiffcapError, match="another value of tile; repeat that command, or delete"):
        PartialResults(path, {**HEADER, "tile": 128})
    path.write_bytes(content.replace(b"[1]", b"[1"))
    with pytest.raises(DiffcapError, match="a damaged file of an unfinished run"):
        PartialResults(path, HEADER)


def test_a_full_disk_names_the_file_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.partial.jsonl"
    with PartialResults(path, HEADER) as partial:
        partial.append([1])

        class Full:
            def write(self, content: bytes) -> int:
                with path.open("ab") as file:
                    file.write(content[: len(content) // 2])
                raise OSError(errno.ENOSPC, "No space left on device")

            def __getattr__(self, name: str) -> Any:
                return getattr(whole, name)

        whole = partial._file
        monkeypatch.setattr(partial, "_file", Full())
        with pytest.raises(OSError) as caught:
            partial.append([2, 3, 4])
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(path))
    with PartialResults(path, HEADER) as partial:
        assert partial.batches == [[1]]
