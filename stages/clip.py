"""Train the small CLIP of `blocks` on rendered scenes and sentences about them, and write the weights that the package ships."""

from diffcap.utils.errors import plain_errors


def main() -> None:
    """Parse the command line, train or resume, evaluate, write the weights."""
    from diffcap.worlds.training.blocks_clip import SHIPPED, BlocksClipTraining, DescribedScenes
    from diffcap.worlds.training.clip import finish
    from diffcap.worlds.training.shipped import train_and_ship

    train_and_ship("clip", BlocksClipTraining, DescribedScenes, SHIPPED, finish)


if __name__ == "__main__":
    with plain_errors():
        main()
