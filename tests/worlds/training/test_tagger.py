import pytest

from diffcap.utils.errors import DiffcapError
from diffcap.worlds.training.tagger import split_held_out, train_tagger

SENTENCES = [[("the", "DET"), (f"word{number % 20}", "NOUN")] for number in range(60)]


def test_held_out_sentences_are_never_trained_on() -> None:
    train, held_out = split_held_out(SENTENCES, 0.25, seed=3)
    assert len(held_out) == 5 and len(train) == 45
    assert not {str(each) for each in train} & {str(each) for each in held_out}
    assert split_held_out(SENTENCES, 0.25, seed=3)[1] == held_out != split_held_out(SENTENCES, 0.25, seed=4)[1]


def test_nothing_to_train_on_is_refused(tmp_path) -> None:
    with pytest.raises(DiffcapError, match="0 training sentences"):
        train_tagger(tmp_path, [], SENTENCES)
    assert list(tmp_path.iterdir()) == []
