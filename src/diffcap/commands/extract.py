"""Extract features of every image of a dataset into its store, data/<dataset>/features/<model.name>/."""

from collections.abc import Sequence


def main(arguments: Sequence[str]) -> None:
    """Read the options, extract what is missing, say where it is."""
    from diffcap.lit.stage_cli import StageCLI  # first: it makes --help quick

    # isort: split
    from diffcap.features.images import ImageData
    from diffcap.lit.extraction import Extraction, extract

    cli = StageCLI(
        Extraction,
        ImageData,
        save_config_callback=None,  # the store's meta.json says what made it
        trainer_defaults={"logger": False, "enable_checkpointing": False, "use_distributed_sampler": False},
        args=list(arguments),
    )
    folder, extracted = extract(cli.trainer, cli.model, cli.datamodule)
    if cli.trainer.is_global_zero:
        print(f"{folder}: {f'complete, {extracted:,} images extracted' if extracted else 'already complete'}.")
