"""The protocol levir_cc: ids worked out by hand, groups, accuracies, S*m, and the commands eval and score."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.datasets.layouts import NO_CHANGE_FIVE, write_levir
from tests.evaluation.stock import stock_scores
from tests.report.layouts import make_scorer

from diffcap.cli import main
from diffcap.commands.data import prepare
from diffcap.commands.evaluate import evaluate as evaluate_checkpoint
from diffcap.datasets.no_change import is_no_change
from diffcap.datasets.registry import WordIdProtocol, datasets
from diffcap.evaluation.captions import FAST_METRICS
from diffcap.evaluation.coco import read_predictions
from diffcap.evaluation.java import meteor
from diffcap.evaluation.protocols import evaluate, evaluate_systems
from diffcap.evaluation.remote_sensing import WordIdScoring, accuracies, id_text, word_id_protocol, word_id_scoring
from diffcap.features.writer import StoreWriter
from diffcap.records import ChangePair, read_dataset
from diffcap.report.rows import score_row
from diffcap.report.table import system_table
from diffcap.text.vocabulary import Vocabulary, build_vocabulary

METRICS = (*FAST_METRICS[:4], "METEOR", *FAST_METRICS[4:])
VOCABULARY = Vocabulary(["a", "appear", "built", "change", "house", "is", "no", "road"], "chg2cap")  # ids 4 to 11


def pair(id: str, *captions: str, split: str = "test", changed: bool = True) -> ChangePair:
    return ChangePair(id, f"A/{id}", f"B/{id}", list(captions), split, None, not changed, {"changeflag": int(changed)})


PAIRS = [
    pair("1", "a road is built", "a road appears"),
    pair("2", "a pergola is built", "a house is built near a road"),
    pair("3", "houses appear", "some houses are there"),
    pair("4", *NO_CHANGE_FIVE, changed=False),
    pair("5", *NO_CHANGE_FIVE, changed=False),
]
CAPTIONS = {
    "1": "a road is built",
    "2": "a gazebo is built",
    "3": "no change has occurred",
    "4": "the scene is the same as before",
    "5": "a house is built",
}


def naive_ids(captions: list[str], numbers: dict[str, int], unknown: int) -> list[str]:
    return [" ".join(str(numbers.get(word, unknown)) for word in caption.split()) for caption in captions]


def test_ids_of_a_caption() -> None:
    assert id_text("a house is built", VOCABULARY) == "4 8 9 6"
    assert id_text("no pergola , a  road .", VOCABULARY) == "10 1 1 4 11"  # unknown word and comma; the full stop goes
    assert id_text("<UNK> House <START> <NULL> road <END>", VOCABULARY) == "1 1 1 1 11 1"
    assert id_text("", VOCABULARY) == ""
    long = " ".join(["road"] * 90)
    assert id_text(long, VOCABULARY) == " ".join(["11"] * 90)  # nothing is cut off
    rsicc = Vocabulary(["road", "a"], "rsicc")  # pad 0, then words, unknown, start, end
    assert id_text("a road <unk> bends <start> .", rsicc) == "2 1 3 3 3"


def test_a_rare_reference_word_and_an_unknown_word_match() -> None:
    only = [pair("2", "a pergola is built"), pair("1", "a road")]
    said = {"2": "a gazebo is built", "1": "a house"}
    result = evaluate(said, only, "raw", FAST_METRICS, id_scoring=WordIdScoring((), VOCABULARY, "by hand"))
    text, ids = result["groups"]["total"], result["id_tokens"]["groups"]["total"]
    # Of six words, five match as ids and four as text. As ids, three of four bigrams match, and all longer n-grams.
    assert text["BLEU-1"] == pytest.approx(4 / 6) and ids["BLEU-1"] == pytest.approx(5 / 6)
    assert text["BLEU-4"] == pytest.approx(0, abs=1e-3) and ids["BLEU-4"] == pytest.approx((5 / 6 * 3 / 4) ** 0.25)
    assert ids["ROUGE-L"] == pytest.approx((1 + 0.5) / 2) and text["ROUGE-L"] == pytest.approx((0.75 + 0.5) / 2)
    assert result["id_tokens"]["protocol"] == {
        "name": "levir_cc", "tokenizer": "ids", "vocabulary": "by hand", "vocabulary_size": 12,
        "metrics": list(FAST_METRICS),
    }  # fmt: skip


def test_words_of_all_splits_are_counted() -> None:
    others = pair("2", "a wide road", split="train"), pair("3", "wide", split="val")
    pairs = [pair("1", "a road", "a wide road"), *others]
    found = word_id_scoring(WordIdProtocol(min_count=3), pairs)
    assert found.vocabulary is not None and set(found.vocabulary.words) == {"a", "road", "wide"}
    assert "at least 3 times" in found.vocabulary_rule and "all splits" in found.vocabulary_rule
    # RSICCformer numbers the words from 1 as they appear first; the unknown word follows.
    assert id_text("wide road a house", found.vocabulary) == "3 2 1 4"
    chg2cap = word_id_scoring(WordIdProtocol(min_count=3, layout="chg2cap"), reversed(pairs)).vocabulary
    assert chg2cap is not None and id_text("wide road a house", chg2cap) == "6 5 4 1"


def test_a_captioner_of_the_released_evaluators_keeps_its_own_vocabulary() -> None:
    spec = WordIdProtocol()
    rsicc, other = (build_vocabulary(["a road"], 1, layout) for layout in ("rsicc", "rcc"))
    found = [word_id_scoring(spec, PAIRS, own).vocabulary is own for own in (VOCABULARY, rsicc, other)]
    assert found == [True, True, False]
    assert word_id_scoring(spec, PAIRS, VOCABULARY).vocabulary_rule == "the captioner's own"


def test_accuracies_by_group() -> None:
    groups = {"total": list("12345"), "change": list("123"), "no_change": list("45"), "none": []}
    assert accuracies(CAPTIONS, PAIRS, groups, NO_CHANGE_FIVE) == {"total": 3 / 5, "change": 2 / 3, "no_change": 1 / 2}
    # Word for word: another sentence that means the same is not one of the five.
    assert is_no_change("nothing has changed")
    said = {**CAPTIONS, "4": "nothing has changed", "5": "No change has  occurred ."}
    assert accuracies(said, PAIRS, {"no_change": ["4", "5"]}, NO_CHANGE_FIVE) == {"no_change": 0.5}


@pytest.mark.parametrize("name", [name for name, spec in datasets().items() if spec.protocol])
def test_the_sentences_of_each_dataset_say_that_nothing_has_changed(name: str) -> None:
    spec = datasets()[name].protocol
    assert spec is not None and all(map(is_no_change, spec.no_change))
    assert len(set(spec.no_change)) == len(spec.no_change) >= 5


def test_the_mean_of_four_metrics_by_group_and_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "diffcap.evaluation.captions.meteor",
        lambda hypotheses, references, groups: {name: 0.1 + len(ids) / 100 for name, ids in groups.items()},
    )
    systems = {"one": CAPTIONS, "two": {one.id: one.captions[-1] for one in PAIRS}}
    results = evaluate_systems(
        systems, PAIRS, "raw", METRICS, id_scoring=WordIdScoring(NO_CHANGE_FIVE, VOCABULARY, "by hand")
    )
    for name, result in results.items():
        alone = evaluate(systems[name], PAIRS, "raw", METRICS)["groups"]
        for group, row in result["groups"].items():
            assert {metric: row[metric] for metric in METRICS} == alone[group]
        right = {"total": 0.6, "change": 2 / 3, "no_change": 0.5} if name == "one" else dict.fromkeys(alone, 1.0)
        for rows in (result["groups"], result["id_tokens"]["groups"]):
            assert {group: row["accuracy"] for group, row in rows.items()} == right
            for row in rows.values():
                mean = (row["BLEU-4"] + row["METEOR"] + row["ROUGE-L"] + row["CIDEr-D"]) / 4
                assert row["S*m"] == pytest.approx(mean)
    fewer = evaluate(CAPTIONS, PAIRS, "raw", FAST_METRICS, id_scoring=WordIdScoring(NO_CHANGE_FIVE))
    assert "S*m" not in fewer["groups"]["total"] and "id_tokens" not in fewer
    assert "accuracy" not in evaluate(CAPTIONS, PAIRS, "raw", FAST_METRICS)["groups"]["total"]


def test_own_pairs_with_is_distractor_have_accuracies_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diffcap.evaluation.captions.meteor", lambda *texts: dict.fromkeys(texts[2], 0.5))
    pairs = [replace(one, extra={}) for one in PAIRS]
    spec = word_id_protocol("desk", pairs)
    assert spec is not None and word_id_protocol("clevr_change", pairs) is None
    result = evaluate(CAPTIONS, pairs, "raw", METRICS, id_scoring=word_id_scoring(spec, pairs, VOCABULARY))
    assert {group: row["accuracy"] for group, row in result["groups"].items()} == {
        "total": 3 / 5, "semantic": 2 / 3, "distractor": 1 / 2
    }  # fmt: skip
    assert "id_tokens" not in result and not any("S*m" in row for row in result["groups"].values())
    rows = system_table({"ours": score_row(result, CAPTIONS, pairs)}).lines()
    assert dict(zip(*rows))["semantic accuracy"] == "66.67" and dict(zip(*rows))["distractor accuracy"] == "50.00"


@pytest.mark.parametrize(("ids", "every"), [("123", "every"), ("45", "no")])
def test_without_both_kinds_of_pairs_there_is_no_accuracy(ids: str, every: str) -> None:
    pairs = [one for one in PAIRS if one.id in ids]
    nonsense = {one.id: f"{one.id} xyz" for one in pairs}
    result = evaluate(nonsense, pairs, "raw", FAST_METRICS, id_scoring=WordIdScoring(NO_CHANGE_FIVE, VOCABULARY))
    assert "accuracy" not in result["groups"]["total"] | result["id_tokens"]["groups"]["total"]
    assert result["notes"] == [f"The accuracy is left out: {every} pair has a change."]


NUMBERS = {"train": [2, 5, 8, 11, 14], "val": [4, 1], "test": [6, 7, 10, 13]}


@pytest.fixture(scope="module")
def levir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """LEVIR-CC, tiny, after the data stage, with random features."""
    folder = tmp_path_factory.mktemp("levir")
    prepare("levir_cc", str(write_levir(folder / "official", NUMBERS)), str(folder / "data"))
    paths = list(dict.fromkeys(path for one in read_dataset(folder / "data").pairs for path in one.images))
    store = StoreWriter(folder / "data/features/toy", paths, (5, 2, 3), {"backbone": "toy"})
    draws = np.random.default_rng(0).standard_normal((len(paths), 5, 2, 3)).astype(np.float32)
    store.write(np.arange(len(paths)), draws)
    store.finish()
    return folder / "data"


def expected_ids(folder: Path, captions: dict[str, str]) -> tuple[dict[str, str], dict[str, list[str]], int]:
    """Captions and references of the test split as numbers, and the number of known words: more than 5 occurrences."""
    pairs = read_dataset(folder).pairs
    counts = Counter(word for one in pairs for caption in one.captions for word in caption.split())
    known = [word for word, count in counts.items() if count > 5]  # as they appear first
    assert 0 < len(known) < len(counts)
    numbers, unknown = {word: place for place, word in enumerate(known, 1)}, len(known) + 1
    test = [one for one in pairs if one.split == "test"]
    hypotheses = {one.id: naive_ids([captions[one.id]], numbers, unknown)[0] for one in test}
    return hypotheses, {one.id: naive_ids(one.captions, numbers, unknown) for one in test}, len(known)


@pytest.mark.slow
def test_eval_and_score_write_and_print_both_protocols(
    levir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["a", "has", "houses", "is", "no", "pergola", "road", "the"]
    checkpoint = make_scorer(tmp_path / "best.ckpt", words)
    known: dict[str, dict[str, float]] = {}  # Java's starts for the same captions would cost more than all the rest
    monkeypatch.setattr(
        "diffcap.evaluation.captions.meteor",
        lambda *texts: known.get(str(texts)) or known.setdefault(str(texts), meteor(*texts)),
    )
    evaluate_checkpoint(str(checkpoint), str(tmp_path / "eval"), str(levir), accelerator="cpu")
    result = json.loads((tmp_path / "eval/metrics.json").read_text())
    file = tmp_path / "eval/predictions.json"
    hypotheses, references, num_words = expected_ids(levir, read_predictions(file))
    entry = result["id_tokens"]
    assert entry["protocol"]["vocabulary_size"] == num_words + 4
    assert entry["protocol"]["vocabulary"].startswith("words that occur at least 6 times in the captions of all splits")
    assert list(entry["groups"]) == list(result["groups"]) == ["total", "change", "no_change"]
    expected = stock_scores(hypotheses, references)
    assert {name: entry["groups"]["total"][name] for name in expected} == pytest.approx(expected, abs=1e-9)
    assert result["protocol"]["tokenizer"] == "ptb" and result["protocol"]["pairs"]["no_change"] == 2
    printed = capsys.readouterr().out
    assert printed.count("S*m") == 2 and printed.count("accuracy") == 3  # the third is that of P(changed)
    assert "ptb tokens" in printed and f"protocol levir_cc, {num_words + 4} ids" in " ".join(printed.split())
    main(["score", str(file), "--protocol", "levir_cc", "--folder", str(levir), "--json"])
    scored = json.loads(capsys.readouterr().out)
    assert scored["groups"] == result["groups"] and scored["id_tokens"] == result["id_tokens"]
    known_groups = {name: row["METEOR"] for name, row in result["groups"].items()}
    by_group = "diffcap.evaluation.captions.meteor", lambda *texts: {g: known_groups[g.split()[-1]] for g in texts[2]}
    monkeypatch.setattr(*by_group)
    main(["score", str(file), "--dataset", "levir_cc", "--folder", str(levir), "--json"])
    text = json.loads(capsys.readouterr().out)
    assert text["groups"] == result["groups"] and "id_tokens" not in text


def test_what_score_refuses(levir: Path, tmp_path: Path) -> None:
    file = tmp_path / "predictions.json"
    file.write_text(json.dumps({"1": "a road"}))

    def refusal(*words: str) -> str:
        with pytest.raises(SystemExit) as caught:
            main(["score", str(file), *words])
        message = str(caught.value)
        assert message.startswith("error: ") and "\n" not in message
        return message

    assert "give a file of references, or --dataset" in refusal()
    assert "give --dataset instead of references" in refusal(str(file), "--protocol=levir_cc")
    assert "remove the file, or --dataset" in refusal(str(file), f"--folder={levir}")
    assert "holds levir_cc, not clevr_change" in refusal("--dataset=clevr_change", f"--folder={levir}")
    assert "1 of 1 ids are not in the test split of levir_cc" in refusal(f"--folder={levir}")
    (tmp_path / "own").mkdir()
    row = {"before": "a.png", "after": "b.png", "captions": ["a road"]}
    lines = [json.dumps({**row, "is_distractor": True, "id": split, "split": split}) for split in ("train", "test")]
    (tmp_path / "own/pairs.jsonl").write_text("\n".join(lines))
    prepare("desk", str(tmp_path / "own"), str(tmp_path / "data"), captions_only=True)
    assert "desk has no protocol levir_cc" in refusal(f"--folder={tmp_path / 'data'}", "--protocol=levir_cc")


def test_a_dataset_of_ones_own_in_the_same_form_has_the_protocol(tmp_path: Path) -> None:
    prepare("desk", str(write_levir(tmp_path / "own", NUMBERS, name="desk.json")), str(tmp_path / "data"))
    pairs = read_dataset(tmp_path / "data").pairs
    assert word_id_protocol("desk", pairs) == word_id_protocol("levir_cc", []) == WordIdProtocol()
    edited = [replace(one, captions=["All as before ."]) if one.is_distractor else one for one in pairs]
    spec = word_id_protocol("desk", edited)
    assert spec is not None and spec.no_change == ("all as before",)
    assert word_id_protocol("desk", [replace(one, extra={}, is_distractor=False) for one in pairs]) is None
