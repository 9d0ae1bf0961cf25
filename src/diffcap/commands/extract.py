"""Extract the features of all images of a dataset into the store data/<dataset>/features/<model.name>/."""

from collections.abc import Sequence


def main(arguments: Sequence[str]) -> None:
    """Parse the options, extract the missing features, print the store's path."""
    from diffcap.features.images import ImageData
    from diffcap.lit.extraction import Extraction, extract
    from diffcap.lit.stage_cli import StageCLI

    cli = StageCLI(
        Extraction,
        ImageData,
        save_config_callback=None,  # the store's meta.json has the settings
        trainer_defaults={"logger": False, "enable_checkpointing": False, "use_distributed_sampler": False},
        args=list(arguments),
    )
    folder, extracted = extract(cli.trainer, cli.model, cli.datamodule)
    if cli.trainer.is_global_zero:
        what = "image files read" if cli.model.from_files else "images extracted"
        print(f"{folder}: {f'complete, {extracted:,} {what}' if extracted else 'already complete'}.")
