"""The small CLIP that ships: what its training sees, its stage by its real command, and what the shipped file knows."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tests.commands import ROOT

from diffcap.datasets.blocks.captions import LEXICON, describe
from diffcap.datasets.blocks.scenes import sample_triples
from diffcap.embedded_training.blocks_backbone import DENSE
from diffcap.embedded_training.clip import NETWORK, SHIPPED, ClipTraining, described_batch, measure
from diffcap.lit.clip_weights import load_clip
from diffcap.models.clip4idc import CLIP4IDC, CLIP4IDCAdaptation
from diffcap.text.bpe import ClipVocabulary, build_clip_vocabulary

SENTENCES = ["the small red cube moved", "a big ball vanished"]


def test_sentences_name_what_is_seen_and_nothing_else() -> None:
    scenes = sample_triples(range(40), seed=3, jitter=1.0).before
    seen = scenes.valid.clone()
    seen[:, 0] &= torch.arange(40) % 2 == 0
    printed = describe(scenes, seen, range(40), seed=3)
    assert printed == describe(scenes, seen, range(40), seed=3) != describe(scenes, seen, range(40), seed=4)
    kinds = {"cube": ("cube", "block"), "sphere": ("sphere", "ball"), "cylinder": ("cylinder",)}
    for row, sentence in enumerate(printed):
        phrases = sentence.split(" and ")
        assert len(phrases) == min(4, int(seen[row].sum())) and len(set(phrases)) == len(phrases)
        there = [
            {name: int(getattr(scenes, name)[row, slot]) for name in ("size", "color", "shape")}
            for slot in seen[row].nonzero().flatten().tolist()
        ]
        for phrase in phrases:
            article, size, color, _, shape = phrase.split()
            assert article == "a" and set(phrase.split()) <= LEXICON.keys()
            number = next(index for index, words in enumerate(kinds.values()) if shape in words)
            colors = ["gray", "red", "blue", "green", "brown", "purple", "cyan", "yellow"]
            wanted = {"size": int(size in ("large", "big")), "color": colors.index(color), "shape": number}
            assert wanted in there, (sentence, there)


def test_every_patch_answers_for_its_own_pixels() -> None:
    training = ClipTraining()
    images, sentences, classes = described_batch(0, 3, seed=5, jitter=1.0)
    assert images.dtype == torch.uint8 and images.shape == (3, 3, 96, 128) and len(sentences) == 3
    assert classes.shape == (3, 4, 12, 16)
    tokens = torch.zeros(1, 49, 128)
    patch = 2 * 8 + 5  # row 2, column 5: blocks of rows 4 and 5, columns 10 and 11
    tokens[0, 1 + patch] = 1
    changed = (training.dense(tokens) - training.dense(torch.zeros_like(tokens))).abs().sum(1)[0]
    assert training.dense(tokens).shape == (1, sum(DENSE), 12, 16)
    assert changed.nonzero().tolist() == [[4, 10], [4, 11], [5, 10], [5, 11]]


@pytest.mark.thorough
def test_the_stage_trains_and_writes_weights_that_load(tmp_path: Path) -> None:
    target = tmp_path / "clip.safetensors"
    options = ["--model.steps=2", "--data.batches=2", "--data.batch_size=4", "--data.num_workers=0"]
    options += [f"--output={target}", "--probe_images=8", f"--trainer.default_root_dir={tmp_path / 'run'}"]
    command = [sys.executable, str(ROOT / "stages" / "clip.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    with safe_open(target, "pt") as file:
        notes, state = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert notes["steps"] == "2 of 4 images" and "--model.dense_weight=1.0" in notes["command"]
    vocabulary = build_clip_vocabulary(SENTENCES, "clip_used")
    model = CLIP4IDCAdaptation(NETWORK, vocabulary_size=len(vocabulary))
    load_clip(model, str(target), vocabulary)
    row = state["token_ids"].tolist().index(vocabulary.clip_ids[vocabulary.encode("cube", 5)[1]])
    ours = model.words.token_embedding.weight[vocabulary.encode("cube", 5)[1]]
    torch.testing.assert_close(ours, state["token_embedding.weight"][row].float(), atol=0, rtol=0)


def test_words_that_the_file_lacks_stay_as_drawn() -> None:
    vocabulary = build_clip_vocabulary([*SENTENCES, "zebras"], "clip_used")
    model = CLIP4IDC(len(vocabulary), NETWORK, width=128, heads=4)
    drawn = model.words.token_embedding.weight.clone()
    load_clip(model, "default", vocabulary)
    known = [row for row, word in enumerate(vocabulary.words) if word.removesuffix("</w>") in LEXICON]
    changed = (model.words.token_embedding.weight != drawn).any(1)
    assert changed[known].all() and changed[-2:].all() and int(changed.sum()) == len(known) + 2 < len(drawn)


def test_a_whole_table_takes_what_the_file_has() -> None:
    model = CLIP4IDCAdaptation(NETWORK)
    drawn = model.words.token_embedding.weight.clone()
    load_clip(model, "default", ClipVocabulary())
    assert 50 < int((model.words.token_embedding.weight != drawn).any(1).sum()) < 200


@pytest.mark.slow
def test_the_shipped_weights_know_the_scenes() -> None:
    training = ClipTraining().eval()
    with safe_open(SHIPPED, "pt") as file:
        state = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118
        notes = file.metadata()
    assert {"command", "seed", "steps", "date", "held_out"} <= set(notes) and "._" not in notes["command"]
    tokens = state.pop("token_ids").long().tolist()
    assert tokens == training.vocabulary.clip_ids
    training.clip.load_state_dict(state)
    scores = measure(training, 200, seed=77, jitter=1.0)
    assert scores["t2p_R@1"] > 0.8 and scores["p2t_R@1"] > 0.8
