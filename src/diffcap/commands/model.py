"""Load the captioner that a command line names."""

from collections.abc import Mapping
from typing import Any

from diffcap.models.generation import check_search
from diffcap.pair_captioner import SHIPPED_CAPTIONERS, PairCaptioner, load_captioner
from diffcap.utils.console import echo


def load_model(
    default_name: str, model_options: Mapping[str, Any], beam: int = 1, length_penalty: float = 0.0
) -> PairCaptioner:
    """Load the captioner of --checkpoint, by default the captioner `default_name` that ships with diffcap, and print notes about it.

    `model_options` has the values of --checkpoint, --device, --backbone_weights, --base and --prompt.
    """
    check_search(beam, length_penalty, "--beam")
    options = {name: value for name, value in model_options.items() if name != "checkpoint"}
    captioner = load_captioner(model_options["checkpoint"] or SHIPPED_CAPTIONERS[default_name], **options)
    if model_options["checkpoint"] is None:
        echo(f"note: no --checkpoint: the captioner `{default_name}`, which ships with diffcap, is used.", err=True)
    if captioner.domain_note is not None:  # warning about images unlike those of the training
        echo(f"note: {captioner.domain_note}", err=True)
    return captioner
