"""Import official IDC-PCL checkpoints (those of the authors' code): rename their parameters, and find the sizes of the model.

The official file is a state dict. In a fine-tuning checkpoint, `pooler` is the distractor head. In a pre-training checkpoint, it is
the image-text matching head, which is left out, because no released configuration uses it.
"""

from torch import Tensor

from diffcap.checkpoints.importing import Importer, ImportOptions, Sizes, State, count_layers, rename, resnet_features

# The authors' names of the encoders, and ours: "single" reads one image, "pair" both images, "cross" both images and the caption.
_ENCODERS = {"single_img_encoder": "single", "double_img_encoder": "pair", "encoder": "cross"}
# Rules to rename parameters: a regular expression of official names, and diffcap's name; None leaves the parameter out.
_TRUNK_RULES = (
    ("word_embedding", "trunk.word_embedding"),
    (r"img_project\.0", "trunk.image_projection"),
    (r"position_encoding\.type_pe", "trunk.type_embedding"),
    ("output_layer", "trunk.output_layer"),
)
_PRETRAIN_RULES = (
    (r"feat_regress\.bias", "regress.bias"),
    (r"feat_regress\.net\.0", "regress.inner.0"),
    (r"feat_regress\.weight", None),  # tied to `img_project.0.weight`
    (r"pooler\..*", None),  # the unused matching head
    (r"(classifier|aligner)\.0\..*", None),  # the heads of the tasks on NABirds
)


def from_official(state: State, stage: str) -> dict[str, Tensor]:
    """Convert an official state dict to one of `PCLPretraining` (stage "pretrain") or `PCL` (stage "finetune")."""
    norms = {r"position_encoding\.layernorm": "trunk.embedding_norm"}  # layer norms: official names, and ours
    if stage == "pretrain":
        norms[r"feat_regress\.net\.2"] = "regress.inner.2"
    rules = [*_TRUNK_RULES, *(_PRETRAIN_RULES if stage == "pretrain" else [(r"pooler\.0", "distractor_head")])]
    for encoder, our_name in _ENCODERS.items():
        norms[rf"{encoder}\.norm"] = f"trunk.{our_name}_encoder.norm"
        layer = rf"{encoder}\.layers\.(\d+)\."
        our_layer = rf"trunk.{our_name}_encoder.layers.\1."
        norms[layer + r"sublayer\.0\.norm"] = our_layer + "attention_norm"
        norms[layer + r"sublayer\.1\.norm"] = our_layer + "ffn_norm"
        rules += [
            # `rename` joins :q, :k and :v to one matrix.
            (layer + r"attn\.([qkv])_linear", our_layer + r"attention.qkv:\2"),
            (layer + r"attn\.out", our_layer + "attention.out"),
            (layer + r"feed_forward\.w_1", our_layer + "ffn.0"),
            (layer + r"feed_forward\.w_2", our_layer + "ffn.3"),
        ]
    for theirs, ours in norms.items():
        rules.append((rf"{theirs}\.a_2", f"{ours}.weight"))  # a_2 and b_2: the authors' names
        rules.append((rf"{theirs}\.b_2", f"{ours}.bias"))
    return rename(state, rules, "IDC-PCL")


def official_sizes(state: State, options: ImportOptions, grid: tuple[int, int] = (7, 7)) -> Sizes:
    """Return the model's hyperparameters, from the authors' state dict and the user's options.

    `grid`: rows and columns of the features; 7 x 7 are those of ResNet-101's layer4 for images of 224 x 224 pixels.
    """
    projection_weight = state["img_project.0.weight"]  # (D, C)
    max_length = options.max_length or 40
    model = {
        "vocabulary_size": len(state["word_embedding.weight"]),
        "feature_channels": projection_weight.shape[1],
        "width": len(projection_weight),
        "heads": options.heads,
        "ffn": len(state["encoder.layers.0.feed_forward.w_1.weight"]),
    }
    for encoder, our_name in _ENCODERS.items():
        model[f"{our_name}_layers"] = count_layers(state, rf"{encoder}\.layers\.(\d+)\.")
    if not _is_pretraining(state):
        model["distractor_judging"] = "pooler.0.weight" in state
    return Sizes(model, max_length, resnet_features("layer4", (projection_weight.shape[1], *grid)))


def _is_pretraining(state: State) -> bool:
    return any(name.startswith("feat_regress.") for name in state)


IMPORTER = Importer(
    official_sizes,
    from_official,
    vocabulary_layout="pcl",
    vocabulary_file="dict.json",
    is_pretraining=_is_pretraining,
)
