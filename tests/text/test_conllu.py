from pathlib import Path

import pytest

from diffcap.text.conllu import read_conllu, write_conllu
from diffcap.utils.errors import DiffcapError

TREEBANK = """# sent_id = 1
# text = Don't move.
1-2\tDon't\t_\t_\t_\t_\t_\t_\t_\t_
1\tDo\tdo\tAUX\tVB\t_\t3\taux\t_\t_
2\tn't\tnot\tPART\tRB\t_\t3\tadvmod\t_\t_
3\tmove\tmove\tVERB\tVB\t_\t0\troot\t_\t_
3.1\tghost\t_\tX\t_\t_\t_\t_\t_\t_
4\t.\t.\tPUNCT\t.\t_\t3\tpunct\t_\t_

1\tYes\tyes\tINTJ\tUH\t_\t0\troot\t_\t_
"""


def test_words_and_tags_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.conllu"
    path.write_text(TREEBANK)
    assert read_conllu(path) == [
        [("Do", "AUX"), ("n't", "PART"), ("move", "VERB"), (".", "PUNCT")],
        [("Yes", "INTJ")],
    ]


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    sentences = [[("the", "DET"), ("cube", "NOUN"), ("moved", "VERB")], [("nothing", "PRON")]]
    write_conllu(tmp_path / "a.conllu", sentences)
    assert read_conllu(tmp_path / "a.conllu") == sentences


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("1\tYes\tINTJ\n", "line 1: 3 columns instead of 10"),
        ("1\t\t_\tINTJ\t_\t_\t0\troot\t_\t_\n", r"line 1: the word \(column 2\) is empty"),
        (TREEBANK.replace("INTJ", "WORD"), "line 10: 'WORD' is not a UPOS tag"),
        ("\n\n", "no tagged word"),
    ],
)
def test_malformed_files_are_one_sentence(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "a.conllu"
    path.write_text(text)
    with pytest.raises(DiffcapError, match=complaint):
        read_conllu(path)


def test_missing_and_binary_files(tmp_path: Path) -> None:
    with pytest.raises(DiffcapError, match="no CoNLL-U file"):
        read_conllu(tmp_path / "none")
    (tmp_path / "a.conllu").write_bytes(b"\xff\xfe")
    with pytest.raises(DiffcapError, match="UTF-8"):
        read_conllu(tmp_path / "a.conllu")
