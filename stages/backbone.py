"""Train the embedded `blocks` backbone on scenes rendered on the fly, and write the weights that the package ships."""

from diffcap.errors import plain_errors


def main() -> None:
    """Read the command line, train or go on with a killed run, measure, write the weights."""
    import diffcap.lit.cli  # noqa: F401  first: it makes --help quick

    # isort: split
    from diffcap.features.blocks_backbone import SHIPPED
    from diffcap.lit.backbone import BackboneTraining, RenderedObjects, finish
    from diffcap.lit.shipped import train_and_ship

    train_and_ship("backbone", BackboneTraining, RenderedObjects, SHIPPED, finish)


if __name__ == "__main__":
    with plain_errors():
        main()
