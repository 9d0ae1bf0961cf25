"""Adapt CLIP to pairs by retrieval; runs/<dataset>/clip4idc/pretrain/best.ckpt is the result."""

from diffcap.errors import plain_errors


def main() -> None:
    """Read the command line and train, from where an interrupted run stopped."""
    from diffcap.lit.run import TrainingCLI  # first: it makes --help quick

    # isort: split
    from diffcap.data.captioning import AdaptData
    from diffcap.lit.adaptation import Adaptation

    TrainingCLI(Adaptation, AdaptData, save_config_callback=None).train("pretrain")


if __name__ == "__main__":
    with plain_errors():
        main()
