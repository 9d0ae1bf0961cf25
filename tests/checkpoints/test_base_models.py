"""Base models of METHOD=vlm: found in a folder or fetched from a mock of the Hub, and checked."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from tests.hub_server import TOKEN, Hub

from diffcap.checkpoints.base_models import base_licence, base_sha256, find_base, names_base_model
from diffcap.checkpoints.hub_access import check_connection
from diffcap.utils.errors import DiffcapError
from diffcap.web.captioners import find_choices

NAME = "user/vlm"
ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
README = b"---\nlicense: apache-2.0\nlanguage:\n- en\n---\n# A model\n"
EVIL = b"from pathlib import Path\nPath(__file__).with_name('was-here').touch()\nclass Evil: pass\n"


def json_bytes(value: Any) -> bytes:
    return json.dumps(value).encode()


def weights(*sizes: int) -> bytes:
    return save({f"w{number}": torch.zeros(size) for number, size in enumerate(sizes)})


def files(**more: bytes) -> dict[str, bytes]:
    """What a repository of a base model has, with small weights in two files."""
    return {
        "config.json": json_bytes({"model_type": "smolvlm"}),
        "generation_config.json": b"{}",
        "tokenizer.json": b"{}",
        "merges.txt": b"a b\n",
        "tokenizer.model": b"pieces",
        "chat_template.jinja": b"{{ messages }}",
        "README.md": README,
        INDEX: json_bytes({"weight_map": {"a": ONE, "b": TWO, "c": TWO}}),
        ONE: weights(3),
        TWO: weights(4, 5),
        **more,
    }


NEEDED = set(files())


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Hub:
    """A mock of the Hub that this process uses, with an empty cache."""
    from huggingface_hub import constants

    hub = Hub()
    use(hub.url, monkeypatch)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    return hub


def use(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the Hub's client send its requests to this address."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The same base model in a local folder."""
    return written(tmp_path / "model", files())


def written(folder: Path, content: dict[str, bytes]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, data in content.items():
        (folder / name).write_bytes(data)
    return folder


def fetched(hub: Hub) -> set[str]:
    """The files that were asked for."""
    found = (re.fullmatch(r"(?:GET|HEAD) /user/\w+/resolve/[^/]+/(.+)", line) for line in hub.asked)
    return {match[1] for match in found if match}


# ------------------------------------------------------------------------------------------------------------------ the Hub


def test_only_needed_files_are_fetched(hub: Hub) -> None:
    other = ("pytorch_model.bin", "model.gguf", "model.onnx", "onnx/config.json", "onnx/model.safetensors", "code.py")
    commit = hub.commit(NAME, files(**dict.fromkeys([*other, "unused.safetensors", "photo.png"], b"?")))
    found = find_base(NAME)
    assert fetched(hub) == NEEDED
    assert (found.name, found.revision, found.licence) == (NAME, commit, "apache-2.0")
    assert {path.name: path.read_bytes() for path in found.folder.iterdir()} == files()
    hub.commit(NAME, files() | {"model.safetensors": weights(9)})
    hub.repositories[NAME].pop(INDEX)
    hub.asked.clear()
    assert (find_base(NAME).folder / "model.safetensors").read_bytes() == weights(9)
    assert not {ONE, TWO} & fetched(hub)


def test_the_licence_is_printed_before_the_weights_are_fetched(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    commit = hub.commit(NAME, files())
    hub.refused = {ONE}
    with pytest.raises(DiffcapError):
        find_base(NAME)
    hub.refused = set()
    expected = f"downloading {NAME} at commit {commit}, licence: apache-2.0\n"
    assert capsys.readouterr().err == expected and not hub.sent[TWO]
    find_base(NAME)
    assert capsys.readouterr().err == expected
    find_base(NAME)
    assert capsys.readouterr().err == ""


def test_a_moved_branch_does_not_change_a_pinned_commit(hub: Hub) -> None:
    old = hub.commit(NAME, files())
    assert find_base(NAME).revision == find_base(NAME, "main").revision == old
    new = hub.commit(NAME, files() | {TWO: weights(4, 6)})
    latest, pinned = find_base(NAME), find_base(NAME, old)
    assert (latest.revision, pinned.revision) == (new, old) and re.fullmatch("[0-9a-f]{40}", new)
    assert (latest.folder / TWO).read_bytes() == weights(4, 6) and (pinned.folder / TWO).read_bytes() == weights(4, 5)
    assert hub.sent[ONE] == len(weights(3))  # an unchanged file is fetched once
    hub.asked.clear()
    assert find_base(NAME, old) == pinned and not hub.asked


@pytest.mark.parametrize("how", ["HF_HUB_OFFLINE", "no network"])
def test_second_start_without_network(hub: Hub, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    commit = hub.commit(NAME, files())
    first = find_base(NAME)
    hub.asked.clear()
    if how == "HF_HUB_OFFLINE":
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    else:
        use("http://127.0.0.1:1", monkeypatch)  # where nobody answers
    assert find_base(NAME) == find_base(NAME, commit) == first
    assert names_base_model(NAME) and not hub.asked


def test_incomplete_cache_without_network(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.commit(NAME, files())
    names_base_model(NAME)  # which fetches config.json
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(DiffcapError, match=r"^user/vlm: HF_HUB_OFFLINE is set, and the model is not in the cache"):
        find_base(NAME)
    check_connection([NAME, None])  # looks for config.json only
    with pytest.raises(DiffcapError, match=r"^user/other: .*, or `blocks` or `tiles` of this package, which describe"):
        check_connection([NAME, "user/other@main"], shipped=True)


@pytest.mark.slow  # the client waits a second before it resumes
def test_a_download_resumes_after_a_broken_connection(hub: Hub) -> None:
    large = weights(3 << 20)  # 12 MiB; the client writes blocks of 10
    hub.commit(NAME, files() | {TWO: large})
    hub.cut[TWO] = 11 << 20
    assert (find_base(NAME).folder / TWO).read_bytes() == large
    assert not hub.cut and hub.sent[TWO] < len(large) + (2 << 20)


def test_complete_files_of_a_failed_download_are_kept(hub: Hub) -> None:
    hub.commit(NAME, files())
    hub.refused = {TWO}
    with pytest.raises(DiffcapError, match=r"the Hub refuses access \(403\); log in"):
        find_base(NAME)
    assert hub.sent[ONE]
    hub.refused = set()
    hub.asked.clear()
    find_base(NAME)
    assert fetched(hub) == {"config.json", TWO} and hub.sent[ONE] == len(weights(3))


def test_the_page_offers_one_commit(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`diffcap serve` pins the commit of its start, and prints it with the licence."""
    commit = hub.commit(NAME, files())
    first, *_ = find_choices([NAME], tmp_path)
    assert (first.label, first.checkpoint) == (f"VLM · without training · vlm@{commit[:7]}", f"{NAME}@{commit}")
    assert f"{NAME} at commit {commit}, licence: apache-2.0\n" in capsys.readouterr().out
    new = hub.commit(NAME, files() | {TWO: weights(4, 6)})
    hub.asked.clear()
    assert names_base_model(first.checkpoint) and find_base(first.checkpoint).revision == commit and not hub.asked
    both = find_choices([NAME, f"{NAME}@{commit}"], tmp_path)[:2]
    assert [choice.checkpoint for choice in both] == [f"{NAME}@{new}", f"{NAME}@{commit}"]
    assert both[0].label != both[1].label


def test_kind_of_a_repository(hub: Hub) -> None:
    hub.commit(NAME, files())
    hub.commit("user/captioner", {"config.json": json_bytes({"format": 1, "model_type": "?"})})
    assert names_base_model(NAME) and not names_base_model("user/captioner") and fetched(hub) == {"config.json"}


def with_code(model_type: str) -> dict[str, bytes]:
    code = {"AutoConfig": "evil.Evil", "AutoModelForImageTextToText": "evil.Evil"}
    return files(**{"config.json": json_bytes({"model_type": model_type, "auto_map": code}), "evil.py": EVIL})


OF = "user/vlm: "
ONLY_BIN = {"config.json": files()["config.json"], "pytorch_model.bin": b"?"}
BERT = files(**{"config.json": b'{"model_type": "bert"}'})


@pytest.mark.parametrize(
    ("source", "content", "sentence", "asked"),
    [
        ("user/vlm@v2", files(), OF + "the Hub has no such revision of this repository; check", None),
        ("user/nobody", None, "user/nobody: the Hub has no repository of this name", None),
        ("user/gated", files(), r"refuses access \(403\); log in .*/user/gated asks you to accept a licence", None),
        (NAME, {"README.md": README}, OF + r"neither a captioner of diffcap nor a base model, config\.json is", None),
        (NAME, {"config.json": b'{"format": 1, "model_type": "?"}'}, OF + r"not a base model, its config", None),
        (NAME, ONLY_BIN, OF + "no weights in safetensors format", {"config.json", "model.safetensors"}),
        (NAME, BERT, OF + "a model of type 'bert', which is not supported; .*qwen2_5_vl", {"config.json"}),
        (NAME, with_code("evil_chat"), "'evil_chat', which is not supported and needs code of its", {"config.json"}),
        *(
            (name, None, f"^{name}: neither a local folder nor the name of a repository on the Hub", set())
            for name in ("alone", "a/b/c", "/no/such/folder", "https://huggingface.co/a/b")
        ),
    ],
)
def test_what_is_no_base_model_is_one_sentence(
    source: str, content: dict[str, bytes] | None, sentence: str, asked: set[str] | None, hub: Hub
) -> None:
    name = source.partition("@")[0]
    if content is not None:
        hub.commit(name, content)
    hub.gated["user/gated"] = 403
    with pytest.raises(DiffcapError, match=sentence) as error:
        find_base(source)
    assert "\n" not in str(error.value) and (asked is None or fetched(hub) == asked)


# -------------------------------------------------------------------------------------------------------------- local folders


def test_a_folder_is_used_as_it_is(folder: Path, hub: Hub) -> None:
    before = sorted(folder.iterdir())
    found = find_base(str(folder), "f" * 40)
    assert (found.folder, found.revision, found.licence) == (folder, None, "apache-2.0") and not hub.asked
    assert sorted(folder.iterdir()) == before and names_base_model(folder) and names_base_model(str(folder))


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 123\n"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"config.json": None}, r"config\.json: no configuration of a base model there; give"),
        ({"config.json": b'{"architectures": []}'}, r"not a base model, its config\.json has no model_type"),
        ({"config.json": b'{"model_type": ["smolvlm"]}'}, r"type \['smolvlm'\], which is not supported"),
        (dict.fromkeys([INDEX, ONE, TWO]), r"model: no weights in safetensors format there, .*json; choose"),
        (
            {**dict.fromkeys([INDEX, ONE, TWO]), "a.bin": b"?"},
            r"json \(a\.bin is not read, because it can contain code\)",
        ),
        ({"adapter_config.json": b"{}"}, r"an adapter \(adapter_config\.json\), which would change the model"),
        ({TWO: None}, rf"model: {TWO}, which {INDEX} names, is missing; download"),
        ({TWO: POINTER}, rf"{TWO}: not a complete safetensors file \(.*header too large\); download"),
        ({TWO: weights(4, 5)[:-1]}, rf"{TWO}: not a complete safetensors file \(.*\); download"),
        ({INDEX: b'{"weight_map": {"a": "../one.safetensors"}}'}, r"index\.json: \"weight_map\" does not give"),
        ({INDEX: b'{"weight_map": {"a": "one.bin"}}'}, r"index\.json: \"weight_map\" does not give"),
        ({INDEX: b"[]"}, r"index\.json: \"weight_map\" does not give"),
    ],
)
def test_incomplete_folders(folder: Path, changes: dict[str, bytes | None], sentence: str) -> None:
    for name, data in changes.items():  # None removes a file
        (folder / name).unlink() if data is None else (folder / name).write_bytes(data)
    with pytest.raises(DiffcapError, match=sentence) as error:
        find_base(str(folder))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("readme", "text", "licence"),
    [
        (b"---\nlicense: mit\n---\n", b"Apache", "mit"),
        (b"---\nlicense: other\nlicense_name: some-research\n---\n", b"", "some-research"),
        (b"---\nlicense_name: some-research\n---\n", b"", "some-research"),
        (b"---\nlicense: [mit, gpl]\n---\n", b"", "mit, gpl"),
        (b"# No metadata\nlicense: mit\n", b"\n# SOME RESEARCH\x07 LICENSE \nline 2\n", "SOME RESEARCH\\x07 LICENSE"),
        (b"---\nlicense: [\n---\n", b"", None),
        (None, b"", None),
    ],
)
def test_licence(folder: Path, readme: bytes | None, text: bytes, licence: str | None) -> None:
    (folder / "README.md").unlink()
    if readme is not None:
        (folder / "README.md").write_bytes(readme)
    if text:
        (folder / "LICENSE").write_bytes(text)
    assert find_base(str(folder)).licence == licence


def test_the_licence_alone_is_fetched_for_a_card(hub: Hub, folder: Path) -> None:
    first = hub.commit(NAME, files())
    hub.commit(NAME, files(**{"README.md": b"", "LICENSE": b"SOME RESEARCH LICENSE\n"}))
    assert base_licence(NAME, first) == base_licence(str(folder), None) == "apache-2.0"
    assert base_licence(NAME, None) == "SOME RESEARCH LICENSE" and fetched(hub) == {"README.md", "LICENSE"}
    assert base_licence("gone", None) is None and base_licence("user/nobody", None) is None


def test_the_hash_identifies_a_base_model(folder: Path, tmp_path: Path, hub: Hub) -> None:
    expected = base_sha256(folder)
    hub.commit(NAME, files())
    written(folder, {"README.md": b"", "notes.safetensors": b"not read"})
    assert base_sha256(folder) == base_sha256(find_base(NAME).folder) == expected
    large = bytearray(weights(1 << 20))  # 4 MiB
    last = large[:-1] + b"\1"
    renamed = {INDEX: json_bytes({"weight_map": {"a": "x.safetensors", "b": TWO}}), "x.safetensors": weights(3)}
    moved = {ONE: weights(4, 5), TWO: weights(3)}
    changed = [{"config.json": b"{}"}, {ONE: weights(4)}, moved, renamed, {TWO: large}, {TWO: last}]
    copies = [shutil.copytree(folder, tmp_path / str(number)) for number in range(len(changed))]
    hashes = {base_sha256(written(copy, content)) for copy, content in zip(copies, changed)}
    assert len(hashes | {expected}) == len(changed) + 1
    (folder / TWO).unlink()
    with pytest.raises(DiffcapError, match=rf"{TWO}: no such file; give a folder with all files of the base model"):
        base_sha256(folder)


@pytest.mark.slow  # imports transformers
def test_a_supported_type_never_runs_the_code_of_its_repository(hub: Hub, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    hub.commit(NAME, with_code("smolvlm"))
    found = find_base(NAME)
    assert "evil.py" not in fetched(hub) and not (found.folder / "evil.py").exists()
    local = find_base(str(written(tmp_path / "evil", with_code("smolvlm"))))
    for folder in (found.folder, local.folder):
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        assert type(config) is transformers.SmolVLMConfig
        model_class = transformers.AutoModelForImageTextToText._model_mapping[type(config)]
        assert model_class.__module__.startswith("transformers.")
    assert not [*tmp_path.rglob("was-here")]
