"""Train the backbone of `tiles` on images rendered during training, and write the weights that the package ships."""

from diffcap.utils.errors import plain_errors


def main() -> None:
    """Parse the command line, train or resume, evaluate, write the weights."""
    from diffcap.features.tiles_backbone import SHIPPED
    from diffcap.worlds.training.shipped import train_and_ship
    from diffcap.worlds.training.tiles_backbone import RenderedTiles, TilesTraining, finish

    train_and_ship("tiles_backbone", TilesTraining, RenderedTiles, SHIPPED, finish)


if __name__ == "__main__":
    with plain_errors():
        main()
