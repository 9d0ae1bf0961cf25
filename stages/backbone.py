"""Train the embedded `blocks` backbone on scenes rendered on the fly, and write the weights that the package ships."""

from diffcap.utils.errors import plain_errors


def main() -> None:
    """Read the command line, train or go on with a killed run, measure, write the weights."""
    import diffcap.lit.stage_cli  # noqa: F401  first: it makes --help quick

    # isort: split
    from diffcap.blocks_training.backbone import BackboneTraining, RenderedObjects, finish
    from diffcap.blocks_training.shipped import train_and_ship
    from diffcap.features.blocks_backbone import SHIPPED

    train_and_ship("backbone", BackboneTraining, RenderedObjects, SHIPPED, finish)


if __name__ == "__main__":
    with plain_errors():
        main()
