"""Train the backbone of `blocks` on scenes rendered during training, and write the weights that the package ships."""

from diffcap.utils.errors import plain_errors


def main() -> None:
    """Parse the command line, train or resume, evaluate, write the weights."""
    from diffcap.features.blocks_backbone import SHIPPED
    from diffcap.worlds.training.blocks_backbone import BackboneTraining, RenderedObjects, finish
    from diffcap.worlds.training.shipped import train_and_ship

    train_and_ship("backbone", BackboneTraining, RenderedObjects, SHIPPED, finish)


if __name__ == "__main__":
    with plain_errors():
        main()
