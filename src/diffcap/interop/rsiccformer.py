"""Rename the parameters of official RSICCformer checkpoints."""

from collections.abc import Mapping

from torch import Tensor

from diffcap.interop.importer import Importer, Rule, rename
from diffcap.interop.remote_sensing import backbone_rules, complete, decoder_rules, residual_rules
from diffcap.interop.sizes import rsiccformer_sizes

_LAYER = r"encoder_feat\.transformer\.(\d+)\."
_RULES: tuple[Rule, ...] = (
    (r"encoder_feat\.w_embedding", "embedding.columns"),
    (r"encoder_feat\.h_embedding", "embedding.rows"),
    (r"encoder_feat\.projection", "embedding.projection"),
    (_LAYER + r"attention\.in_proj_(weight|bias)", r"encoder.\1.attention.qkv.\2"),
    (_LAYER + r"attention\.out_proj", r"encoder.\1.attention.out"),
    (_LAYER + "norm([12])", r"encoder.\1.norm\2"),
    (_LAYER + "linear1", r"encoder.\1.ffn.0"),
    (_LAYER + "linear2", r"encoder.\1.ffn.3"),
    *residual_rules(r"encoder_feat\.resblock\.(\d+)", r"merge.\1.residual"),
    (r"encoder_feat\.LN\.(\d+)", r"merge.\1.norm"),
    *decoder_rules("decoder", "multihead_attn2"),
    *backbone_rules(r"encoder_image\.net"),
    # stored, not used
    (r"encoder_feat\.(?:embedding_1D|projection[234])", None),
    (r"decoder\.transformer\.layers\.\d+\.(?:self_attn2|multihead_attn3?)\.(?:in_proj_(?:weight|bias)|out_proj)", None),
)


def from_official(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename an official state dict to that of `RSICCformer`.

    The names have the prefix of their group: `encoder_feat.`, `decoder.` and, for a model with `backbone`, `encoder_image.`. The
    result lacks the parameters that the authors' program does not use.
    """
    return complete(rename(state, _RULES, "RSICCformer"))


# The file has whole modules and optimizers; these are their classes, of torch, torchvision and the authors.
_CLASSES = (
    *("Conv2d", "BatchNorm2d", "ReLU", "MaxPool2d", "AdaptiveAvgPool2d", "Softmax", "Bottleneck", "BasicBlock"),
    *("Linear", "NonDynamicallyQuantizableLinear", "_LinearWithBias", "MultiheadAttention", "LayerNorm", "Dropout"),
    *("Embedding", "Sequential", "ModuleList", "TransformerDecoder", "Adam", "defaultdict", "dict"),
    *("CNN_Encoder", "MCCFormers_diff_as_Q", "CrossTransformer", "resblock"),
    *("DecoderTransformer", "Mesh_TransformerDecoderLayer", "PositionalEncoding"),
)

IMPORTER = Importer(
    rsiccformer_sizes,
    lambda state, stage: from_official(state),
    vocabulary_layout="rsicc",
    vocabulary_file="WORDMAP_*.json",
    groups=("encoder_image", "encoder_feat", "decoder"),
    pickled_classes=_CLASSES,
)
