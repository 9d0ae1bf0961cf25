"""Common parts of the checkpoints that the authors of SCORER and of DIRL released. Both extend the code of RobustChangeCaptioning (RCC)."""

import re
from functools import partial

from diffcap.checkpoints.importing import Importer, ImportOptions, Rule, Sizes, State, count_layers, resnet_features
from diffcap.features.preprocessing import RCC_STD, ResizeNormalize

# Rules to rename the parameters of RCC's image embedding and word layers: a regular expression of the authors' name, and diffcap's name.
RULES: tuple[Rule, ...] = (
    (r"change_detector_state\.img\.0", "embedding.projection"),
    (r"change_detector_state\.w_embedding", "embedding.columns"),
    (r"change_detector_state\.h_embedding", "embedding.rows"),
    (r"speaker_state\.core\.embed", "decoder.embedding"),
    (r"speaker_state\.core\.fc\.(\d+)", r"decoder.lift.\1"),
    (r"speaker_state\.core\.layer\.(\d+)\.(norm\d)", r"decoder.blocks.\1.\2"),
    (r"speaker_state\.logit", "decoder.logit"),
)


def common_sizes(state: State, options: ImportOptions, coordinates: bool | None) -> Sizes:
    """Return the hyperparameters that `SCORER` and `DIRL` both have.

    Args:
        state: the authors' parameters. options: if `max_length` is None, it is the length of the position table in `state`, or else 24.
        coordinates: whether x and y are two more channels of the features. None: they are if the number of channels is 4 n + 2 (1026).
    """
    projection = state["change_detector_state.img.0.weight"]
    word_vectors = state["speaker_state.core.embed.weight"]
    width, channels = projection.shape[:2]
    if coordinates is None:
        coordinates = channels % 4 == 2
    grid = [len(state[f"change_detector_state.{side}_embedding.weight"]) for side in "hw"]
    positions = [value for name, value in state.items() if re.fullmatch(r"speaker_state\.(.*\.)?pe", name)]
    max_length = options.max_length or (positions[0].shape[-2] if positions else 24)
    feature_channels = channels - 2 * coordinates
    model = {
        "vocabulary_size": len(word_vectors),
        "feature_channels": feature_channels,
        "grid": grid,
        "max_length": max_length,
        "width": width,
        "heads": options.heads,
        "word_width": word_vectors.shape[1],
        "coordinates": coordinates,
        "decoder_layers": count_layers(state, r"speaker_state\.core\.layer\.(\d+)\."),
    }
    features = resnet_features("layer3", (feature_channels, grid[0], grid[1]), ResizeNormalize(std=RCC_STD))
    return Sizes(model, max_length, features)


# `importer(sizes, rename)` returns the `Importer` of a method that extends RCC's code.
importer = partial(
    Importer,
    vocabulary_layout="rcc",
    vocabulary_file="vocab.json",
    groups=("change_detector_state", "speaker_state"),  # the two state dicts in a checkpoint
    pickled_classes=("AttrDict",),  # class of the settings in a checkpoint; diffcap does not use the settings
)
