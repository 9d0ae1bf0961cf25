"""Train the small CLIP of `tiles` on rendered images and sentences about them, and write the weights that the package ships."""

from diffcap.utils.errors import plain_errors


def main() -> None:
    """Parse the command line, train or resume, evaluate, write the weights."""
    from diffcap.worlds.training.clip import finish
    from diffcap.worlds.training.shipped import train_and_ship
    from diffcap.worlds.training.tiles_clip import SHIPPED, DescribedTiles, TilesClipTraining

    train_and_ship("tiles_clip", TilesClipTraining, DescribedTiles, SHIPPED, finish)


if __name__ == "__main__":
    with plain_errors():
        main()
