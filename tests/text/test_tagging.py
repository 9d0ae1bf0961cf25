import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from diffcap.text import tagging
from diffcap.text.stanza_tagger import SHIPPED_TAGGERS, find_tagger, read_conllu, write_conllu
from diffcap.text.tagging import split_sentences, tag_sentences
from diffcap.utils.errors import DiffcapError
from diffcap.worlds.blocks.captions import LEXICON

COLORS = ("red", "blue", "green", "cyan", "gray", "brown", "purple", "yellow")
CAPTIONS = [
    f"the {size} {color} {material} {shape} that is behind the {color} {other} {end}"
    for color in COLORS
    for size, material, shape, other, end in (
        ("big", "shiny", "ball", "cube", "was added"),
        ("tiny", "rubber", "block", "sphere", "has a different position"),
        ("small", "metallic", "cylinder", "ball", "is gone"),
        ("large", "matte", "cube", "cylinder", f"changed its color to {color}"),
    )
]


def gold(caption: str) -> list[str]:
    return [LEXICON[word] for word in caption.split()]


def test_sentences_are_cut_behind_their_ends() -> None:
    tokens = ["a", "b", ".", "c", "!", "d", ";", "e", "f"]
    assert split_sentences(tokens) == [["a", "b", "."], ["c", "!"], ["d", ";"], ["e", "f"]]
    assert split_sentences(["."]) == [["."]]
    assert split_sentences([]) == []


def test_the_shipped_tagger_knows_the_grammar() -> None:
    sentences = [*CAPTIONS, "the two pictures are identical", "everything is still in its place"]
    assert {word for sentence in sentences for word in sentence.split()} <= set(LEXICON)
    assert tag_sentences([*sentences, "", sentences[0]], "blocks") == {each: gold(each) for each in sentences}


def test_known_sentences_are_not_tagged_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "tags.jsonl"
    first = tag_sentences(CAPTIONS, "blocks", cache)
    monkeypatch.delattr(tagging, "load_pipeline")  # nothing is left to tag
    assert tag_sentences(CAPTIONS[::-1], "blocks", cache) == first


@pytest.mark.thorough
def test_a_torn_file_is_mended_to_the_undisturbed_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tagging, "CHUNK_SIZE", 8)
    cache = tmp_path / "tags.jsonl"
    whole = tag_sentences(CAPTIONS, "blocks", cache, workers=1)
    text = cache.read_bytes()
    for cut, workers in ((len(text) // 2, 1), (7, 2)):
        cache.write_bytes(text[:cut])
        assert tag_sentences(CAPTIONS, "blocks", cache, workers=workers) == whole
        assert cache.read_bytes() == text


def test_tags_of_another_tagger_are_not_taken(tmp_path: Path) -> None:
    cache = tmp_path / "tags.jsonl"
    header = {"tagger": "blocks", "identity": "of another model"}
    row = {"sentence": CAPTIONS[0], "tags": " ".join("X" for _ in CAPTIONS[0].split())}
    cache.write_text(json.dumps(header) + "\n" + json.dumps(row) + "\n")
    assert tag_sentences(CAPTIONS[:1], "blocks", cache) == {CAPTIONS[0]: gold(CAPTIONS[0])}
    assert json.loads(cache.read_text().split("\n")[0])["identity"] == find_tagger("blocks").identity


def a_folder(path: Path, weights: bytes | None = None) -> Path:
    path.mkdir()
    (path / "resources.json").write_text((SHIPPED_TAGGERS["blocks"] / "resources.json").read_text())
    if weights is not None:
        (path / "tagger.pt").write_bytes(weights)
    return path


def test_a_local_folder_is_a_tagger(tmp_path: Path) -> None:
    folder = a_folder(tmp_path / "mine", (SHIPPED_TAGGERS["blocks"] / "tagger.pt").read_bytes())
    assert find_tagger(str(folder)).identity == find_tagger("blocks").identity
    assert tag_sentences(CAPTIONS[:1], str(folder)) == {CAPTIONS[0]: gold(CAPTIONS[0])}


@pytest.mark.slow  # two processes
def test_a_truncated_model_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tagging, "CHUNK_SIZE", 5)
    folder = a_folder(tmp_path / "mine", (SHIPPED_TAGGERS["blocks"] / "tagger.pt").read_bytes()[:5000])
    with pytest.raises(DiffcapError, match=r"tagger\.pt: Stanza cannot load this tagger") as caught:
        tag_sentences(CAPTIONS, str(folder), workers=2)
    assert "\n" not in str(caught.value)


def test_a_folder_that_is_no_tagger_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DiffcapError, match="no such tagger"):
        find_tagger(str(tmp_path / "nowhere"))
    with pytest.raises(DiffcapError, match=r"0 \.pt files"):
        find_tagger(str(a_folder(tmp_path / "empty")))
    folder = a_folder(tmp_path / "bare", b"x")
    (folder / "resources.json").unlink()
    with pytest.raises(DiffcapError, match=r"resources\.json"):
        find_tagger(str(folder))


def test_english_offline_names_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: object, **options: object) -> None:
        assert options["lang"] == "en"
        raise ConnectionError("no route to host\nat all")

    monkeypatch.setattr("stanza.Pipeline", offline)
    with pytest.raises(DiffcapError, match="TAGGER=FOLDER, or use TAGGER=blocks") as caught:
        tag_sentences(CAPTIONS, "english")
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_english_is_what_stanza_keeps_on_this_machine(tmp_path: Path) -> None:
    """A folder of Stanza's own form, as its download leaves it, with the tiny tagger in the place of the real one."""
    weights = (SHIPPED_TAGGERS["blocks"] / "tagger.pt").read_bytes()
    files = {"tokenize": ("none", b"never loaded"), "pos": ("captions", weights)}
    packages = {processor: name for processor, (name, _) in files.items()}
    english: dict[str, object] = {"lang_name": "English", "packages": {"default": packages}}
    for processor, (name, content) in files.items():
        (tmp_path / "en" / processor).mkdir(parents=True)
        (tmp_path / "en" / processor / f"{name}.pt").write_bytes(content)
        english[processor] = {name: {"md5": hashlib.md5(content).hexdigest()}}
    (tmp_path / "resources.json").write_text(json.dumps({"url": "http://127.0.0.1:9/{filename}", "en": english}))
    code = (
        "from diffcap.text.tagging import tag_sentences\n"
        f"print(tag_sentences({CAPTIONS[:1]!r}, 'english', {str(tmp_path / 'tags.jsonl')!r}))"
    )
    environment = {**os.environ, "STANZA_RESOURCES_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == str({CAPTIONS[0]: gold(CAPTIONS[0])}), done.stderr
    assert json.loads((tmp_path / "tags.jsonl").read_text().split("\n")[0])["tagger"] == "english"


TREEBANK = """# sent_id = 1
# text = Don't move.
1-2\tDon't\t_\t_\t_\t_\t_\t_\t_\t_
1\tDo\tdo\tAUX\tVB\t_\t3\taux\t_\t_
2\tn't\tnot\tPART\tRB\t_\t3\tadvmod\t_\t_
3\tmove\tmove\tVERB\tVB\t_\t0\troot\t_\t_
3.1\tghost\t_\tX\t_\t_\t_\t_\t_\t_
4\t.\t.\tPUNCT\t.\t_\t3\tpunct\t_\t_

1-2\tDon't\t_\t_\t_\t_\t_\t_\t_\t_

1\tYes\tyes\tINTJ\tUH\t_\t0\troot\t_\t_
"""


def test_words_and_tags_are_read_and_written(tmp_path: Path) -> None:
    path = tmp_path / "a.conllu"
    path.write_text(TREEBANK)
    sentences = [[("Do", "AUX"), ("n't", "PART"), ("move", "VERB"), (".", "PUNCT")], [("Yes", "INTJ")]]
    assert read_conllu(path) == sentences
    write_conllu(path, sentences)
    assert read_conllu(path) == sentences


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("1\tYes\tINTJ\n", "line 1: expecting 10 fields, 3 found"),
        (TREEBANK.replace("INTJ", "WORD"), "the tag 'WORD' of 'Yes' is not a UPOS tag"),
        ("\n\n", "no tagged word"),
        (b"\xff\xfe", "not a CoNLL-U file .*utf-8"),
    ],
)
def test_malformed_files_are_one_sentence(tmp_path: Path, text: str | bytes, complaint: str) -> None:
    path = tmp_path / "a.conllu"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(DiffcapError, match=complaint):
        read_conllu(path)
