"""diffcap: describe in one sentence what changed between two similar images."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diffcap.change import Caption
    from diffcap.pair_captioner import PairCaptioner, load_captioner

__version__ = "0.1.0"
__all__ = ["Caption", "PairCaptioner", "load_captioner"]


def __getattr__(name: str) -> Any:
    """Import the captioner on first use, because importing torch takes seconds."""
    if name in __all__:
        import diffcap.pair_captioner

        return getattr(diffcap.pair_captioner, name)
    raise AttributeError(f"module 'diffcap' has no attribute {name!r}")
