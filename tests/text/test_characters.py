"""Captions in scripts without blanks between words: in the vocabulary, in the scores, and in the captions of two images."""

import json
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from tests.datasets.layouts import write_image, write_lines
from tests.test_pair_captioner import make, noise

from diffcap import load_captioner
from diffcap.cli import main
from diffcap.commands.data import prepare
from diffcap.evaluation import bootstrap, protocols
from diffcap.evaluation.remote_sensing import WordIdScoring
from diffcap.lit.finetuning import Captioning
from diffcap.records import ChangePair, read_dataset
from diffcap.text.characters import join_characters, split_characters, uses_characters
from diffcap.text.hub import ChatTemplate, HubVocabulary


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("一个red立方体不见了。", "一 个 red 立 方 体 不 见 了"),
        ("桌上的\uff13本书\uff0c没有了\uff01", "桌 上 的 3 本 书 没 有 了"),
        ("赤いボールが消えた。", "赤 い ボ ー ル が 消 え た"),
        ("ไม่มีการเปลี่ยนแปลง", "ไ ม่ มี ก า ร เ ป ลี่ ย น แ ป ล ง"),  # marks stay with their letter
        ("ບໍ່ມີການ", "ບໍ່ ມີ ກ າ ນ"),
        ("빨간 공이 사라졌다.", "빨간 공이 사라졌다"),  # Korean has blanks
        ("the dog's cup-holder is gone.", "the dog's cup-holder is gone"),
    ],
)
def test_a_character_is_a_token(text: str, tokens: str) -> None:
    assert split_characters(text) == tokens and split_characters(tokens) == tokens


@pytest.mark.parametrize(
    ("captions", "expected"),
    [
        (["the box of 红色方块公司 is gone"] * 20, False),  # most letters are Latin
        (["绿色的方块被移走了"] + ["the cup is gone"] * 30, False),
        (["绿色的方块被移走了"] + ["the cup is gone"] * 10, True),
        (["把红色的 cup 移走了"] * 9, True),
        (["绿 色 的 方 块"] * 9, True),
        (["绿色 的 方块 被 移走 了"] * 9, False),  # divided into words
        (["赤い スポーツカー が 駐車場 に 止まっ て いる", "プール の 横 に テニスコート が でき た"], False),
        (["一条 高速公路 建成 了", "多了 一栋 住宅建筑", "出现 了 太阳能板 和 道路"], False),
        (["左边的房子不见了 右边没有变化"] * 9, True),  # a blank between clauses
        (["ไม่มีการเปลี่ยนแปลง"] * 3, True),
        ([], False),
    ],
)
def test_the_dataset_decides(captions: list[str], expected: bool) -> None:
    assert uses_characters(captions) == expected


def test_the_vocabulary_of_a_dataset_has_characters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = []
    for number in range(40):
        write_image(tmp_path / f"{number}.png", number)
        text = f"绿色的方块在第{number}张图里被移走了。" if number % 2 else f"第{number}张图没有变化"
        rows.append({"before": f"{number}.png", "after": f"{number}.png", "captions": [text]})
    write_lines(tmp_path / "pairs.jsonl", rows)
    prepare("zh", str(tmp_path), str(tmp_path / "out"))
    assert "published scores count words" in " ".join(capsys.readouterr().out.split())
    assert read_dataset(tmp_path / "out").pairs[1].captions == ["绿 色 的 方 块 在 第 1 张 图 里 被 移 走 了"]
    words = json.loads((tmp_path / "out/vocabulary.json").read_text())["words"]
    assert {"绿", "色", "没"} < set(words) and all(len(word) == 1 or word.isdecimal() for word in words)


@pytest.mark.slow
def test_scores_compare_characters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Captions may be divided or not, as those of `diffcap caption` and of a captioner."""
    texts = {
        "1": ["红色的球不见了", "球被拿走了"],
        "2": ["桌上多了一本书", "桌上有新书"],
        "3": ["没有变化", "什么都没变"],
    }
    captions = {"1": "红色的球消失了", "2": "桌上有一本新书", "3": "没有变化"}
    scores = []
    for divide_captions, divide_references in ((str, str), (split_characters, str), (str, split_characters)):
        rows = [{"image_id": id, "caption": divide_references(text)} for id in texts for text in texts[id]]
        (tmp_path / "references.json").write_text(json.dumps({"annotations": rows}))
        (tmp_path / "zh.json").write_text(json.dumps({id: divide_captions(text) for id, text in captions.items()}))
        main(["score", str(tmp_path / "zh.json"), str(tmp_path / "references.json"), "--json"])
        result = json.loads(capsys.readouterr().out)
        assert "published scores count words. METEOR and SPICE are left out" in result["notes"][0]
        scores.append(result["groups"]["total"])
    assert scores[0] == scores[1] == scores[2] and "METEOR" not in scores[0]
    assert 0 < scores[0]["BLEU-4"] < 1 and scores[0]["CIDEr-D"] > 1  # of whole sentences, both would be nearly 0


def test_undivided_captions_are_compared_with_divided_references(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in `diffcap compare`, and in the validation of a vision-language model, which writes undivided text."""
    captions = {"1": "红色的球不见了", "2": "桌上多了一本书", "3": "没有变化"}
    references = {id: [split_characters(text)] for id, text in captions.items()}
    groups = {"total": list(captions)}
    scores = bootstrap.compare(captions, captions, references, groups, "raw", samples=2)["groups"]["total"]
    assert scores["BLEU-4"]["a"] == pytest.approx(1) and "METEOR" not in scores
    pairs = [ChangePair(id, "a.png", "b.png", texts, "test", None, id == "3") for id, texts in references.items()]
    scoring = WordIdScoring(("没 有 变 化",), accuracy_only=True)
    groups = protocols.evaluate(captions, pairs, "raw", ["BLEU-4"], id_scoring=scoring)["groups"]
    assert groups["total"]["accuracy"] == 1
    monkeypatch.setattr(Captioning, "feature_data", Mock(val_references=references))
    module = Captioning(Mock(spec=torch.nn.Module), tokenizer="raw")
    module._make_metric()
    module.metric.update(list(captions), [module.scored_text(text) for text in captions.values()])
    assert module.metric.compute()["ROUGE-L"] == pytest.approx(1)


def test_captions_of_two_images_are_joined(tmp_path: Path) -> None:
    state = torch.load(make(tmp_path / "best.ckpt", "scorer"), weights_only=True)
    state["diffcap"]["words"] = list("绿色的方块走了")
    torch.save(state, tmp_path / "best.ckpt")
    caption = load_captioner(tmp_path / "best.ckpt", device="cpu")(noise(1), noise(2), beams=2)
    assert len(caption.words) > 1 and caption.text == "".join(word.text for word in caption.words)
    assert all(" " not in other.text for other in caption.alternatives)
    assert join_characters("一 个 red 立 方 体") == "一个 red 立方体" == join_characters("一个 red 立方体")
    for text in ("红色 的 球 消失 了", "the red cube is gone", ""):  # divided into words
        assert join_characters(text) == text


def test_a_vision_language_model_learns_joined_text() -> None:
    tokenizer = Mock(return_value={"input_ids": [7]}, get_vocab=dict, pad_token_id=0)
    assert HubVocabulary(tokenizer, ChatTemplate("", 1, 2, ""), None).encode("绿 色 的 red 球", 20) == [1, 7, 2]
    tokenizer.assert_called_once_with("绿色的 red 球", add_special_tokens=False)
