"""Initial weights that the authors' code of several methods has."""

from torch import nn

from diffcap.models.layers import Attention


def init_xavier_(module: nn.Module) -> None:
    """Xavier-uniform for every parameter with two or more dimensions, embeddings and convolutions included (authors' code)."""
    for parameter in module.parameters():
        if parameter.ndim >= 2:
            nn.init.xavier_uniform_(parameter)


def init_attention_(module: nn.Module) -> None:
    """The initial weights of torch's MultiheadAttention in every `Attention`: Xavier for the packed input matrix, biases 0."""
    for part in module.modules():
        if isinstance(part, Attention):
            nn.init.xavier_uniform_(part.qkv.weight)
            nn.init.zeros_(part.qkv.bias)
            nn.init.zeros_(part.out.bias)  # type: ignore[arg-type]
