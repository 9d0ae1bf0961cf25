"""The small CLIPs that ship: what their training sees, their stages by their real commands, and what the shipped files know."""

import random

import pytest
import torch
from safetensors import safe_open

from diffcap.experiment import Experiment
from diffcap.methods.clip4idc.model import CLIP4IDC, CLIP4IDCAdaptation
from diffcap.methods.clip4idc.weights import load_clip
from diffcap.text.vocabularies import build_clip_vocabulary
from diffcap.utils.settings import backbones
from diffcap.worlds.blocks.captions import LEXICON, describe
from diffcap.worlds.blocks.scenes import sample_triples
from diffcap.worlds.tiles.captions import LEXICON as TILES_LEXICON
from diffcap.worlds.tiles.captions import describe as describe_tile
from diffcap.worlds.tiles.captions import write_captions
from diffcap.worlds.tiles.changes import sample_pair
from diffcap.worlds.tiles.scenes import ROOF_COLORS, House, Layer, Road, Zone
from diffcap.worlds.training.blocks import BlocksClip
from diffcap.worlds.training.shipped import ClipTraining
from diffcap.worlds.training.tiles import TilesClip

SENTENCES = ["the small red cube moved", "a big ball vanished"]


@pytest.mark.parametrize(
    ("training", "size", "grid", "places"), [(BlocksClip, (96, 128), (6, 8), 2), (TilesClip, (128, 128), (8, 8), 4)]
)
def test_every_patch_answers_for_its_own_pixels(
    training: type[ClipTraining], size: tuple[int, int], grid: tuple[int, int], places: int
) -> None:
    model = training()
    images, sentences, _ = training.render_batch(0, 3, seed=5, jitter=1.0)
    assert images.dtype == torch.uint8 and images.shape == (3, 3, *size) and len(sentences) == 3
    tokens = torch.zeros(1, 1 + grid[0] * grid[1], 128)
    tokens[0, 1 + 2 * grid[1] + 5] = 1  # row 2, column 5
    changed = (model.dense_logits(tokens) - model.dense_logits(torch.zeros_like(tokens))).abs().sum(1)[0]
    assert changed.shape == (grid[0] * places, grid[1] * places)
    rows, columns = range(2 * places, 3 * places), range(5 * places, 6 * places)
    assert changed.nonzero().tolist() == [[row, column] for row in rows for column in columns]


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


def test_sentences_of_tiles_name_places_and_numbers() -> None:
    top_left, bottom_right = ((20, 20), (50, 30)), ((230, 230),)
    houses = [House(center, 0.0, 18, 12, 6, ROOF_COLORS.index("red"), True) for center in (*top_left, *bottom_right)]
    small = ((100, 100), (110, 100), (110, 110), (100, 110))  # too small to be named
    wood = Zone(((180, 0), (250, 0), (250, 70), (180, 70)), "forest")
    scene = Layer(
        zones=[wood, Zone(small, "bare")],
        ponds=[small],
        roads=[Road(((0, 128), (256, 128)), 9, is_paved=False)],
        houses=houses,
    )

    def at(thing: str, vertical: tuple[str, str], horizontal: str) -> set[str]:
        return {f"{thing} in the {row} {horizontal}{end}" for row in vertical for end in ("", " corner", " part")}

    expected = {
        *at("two houses", ("top", "upper"), "left"),
        *at("a house with a red roof", ("bottom", "lower"), "right"),
        *at("a forest", ("top", "upper"), "right"),
        "a dirt road",
    }
    named = [describe_tile(scene, number, max_things=4).split(" and ") for number in range(200)]
    assert all(len(phrases) == 4 for phrases in named)
    assert {phrase for phrases in named for phrase in phrases} == expected
    assert describe_tile(Layer(), 0) == "grassland"


def test_the_settings_of_tiles_fit_the_shipped_clip() -> None:
    experiment = Experiment(method="clip4idc", dataset="tiles")
    networks = {
        experiment.setting(stage, "model", "captioner", "init_args", "network") for stage in ("pretrain", "finetune")
    }
    assert networks == {TilesClip.clip_name}
    size = backbones()["tiles_pixels"]["image_size"]
    captions = [
        caption
        for number in range(400)
        for caption in write_captions(random.Random(number), sample_pair(number, 3).change)
    ]
    vocabulary = build_clip_vocabulary(captions, "clip_used")
    model = CLIP4IDCAdaptation(TilesClip.clip_name, vocabulary_size=len(vocabulary))
    assert list(model.images.visual.image_size) == size
    drawn = model.words.token_embedding.weight.clone()
    load_clip(model, "default", vocabulary)
    words = [row for row, word in enumerate(vocabulary.words) if word.removesuffix("</w>") in TILES_LEXICON]
    assert len(words) > 100 and (model.words.token_embedding.weight != drawn).any(1)[words].all()


def test_words_that_the_file_lacks_stay_as_drawn() -> None:
    vocabulary = build_clip_vocabulary([*SENTENCES, "zebras"], "clip_used")
    model = CLIP4IDC(len(vocabulary), BlocksClip.clip_name, width=128, heads=4)
    drawn = model.words.token_embedding.weight.clone()
    load_clip(model, "default", vocabulary)
    known = [row for row, word in enumerate(vocabulary.words) if word.removesuffix("</w>") in LEXICON]
    changed = (model.words.token_embedding.weight != drawn).any(1)
    assert changed[known].all() and changed[-2:].all() and int(changed.sum()) == len(known) + 2 < len(drawn)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("training", "recall"),
    [
        (BlocksClip, 0.8),
        # A sentence about a tile names three of many things, so it fits many images; chance is 0.005.
        (TilesClip, 0.08),
    ],
)
def test_the_shipped_weights_know_the_scenes(training: type[ClipTraining], recall: float) -> None:
    model = training().eval()
    with safe_open(training.weights_file, "pt") as file:
        state = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118
        notes = file.metadata()
    assert {"command", "seed", "steps", "date", "held_out"} <= set(notes) and "._" not in notes["command"]
    tokens = state.pop("token_ids").long().tolist()
    assert tokens == model.vocabulary.clip_ids
    model.clip.load_state_dict(state)
    with torch.no_grad():
        scores = model.measure(200, seed=77, jitter=1.0)
    assert scores["t2p_R@1"] > recall and scores["p2t_R@1"] > recall
