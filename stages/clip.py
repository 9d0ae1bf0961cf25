"""Train the small CLIP of `blocks` on scenes rendered on the fly and sentences about them, and write the weights that the package ships."""

from diffcap.utils.errors import plain_errors


def main() -> None:
    """Read the command line, train or go on with a killed run, measure, write the weights."""
    import diffcap.lit.stage_cli  # noqa: F401  first: it makes --help quick

    # isort: split
    from diffcap.blocks_training.clip import SHIPPED, ClipTraining, DescribedScenes, finish
    from diffcap.blocks_training.shipped import train_and_ship

    train_and_ship("clip", ClipTraining, DescribedScenes, SHIPPED, finish)


if __name__ == "__main__":
    with plain_errors():
        main()
