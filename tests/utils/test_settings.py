"""Settings files that stages look into themselves."""

from pathlib import Path

import pytest

from diffcap.utils.errors import DiffcapError
from diffcap.utils.settings import get_config_value


def test_the_last_file_that_has_a_setting_wins(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("first.yaml", "second.yaml", "third.yaml", "none.yaml")]
    files[0].write_text("data: {changes: single, mask_ratio: 0.15}\n")
    files[1].write_text("data: {changes: multi}\nmodel:\n")
    files[2].write_text("# nothing but a comment\n")
    assert get_config_value(files, "data", "changes") == "multi"
    assert get_config_value(files, "data", "mask_ratio") == 0.15
    assert get_config_value(files, "model", "captioner", "width") is None
    files[1].write_text("data: {distractors: false}\n")
    assert get_config_value(files, "data", "distractors") is False  # "off" is a value, too


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "blocks.yaml").write_text("data: [changes\n")
    with pytest.raises(DiffcapError, match=r"blocks\.yaml: not YAML .*; fix the file"):
        get_config_value([tmp_path / "blocks.yaml"], "data", "changes")
