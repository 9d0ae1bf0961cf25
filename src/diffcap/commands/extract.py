"""Extract the features of all images of a dataset into the store data/<dataset>/features/<model.name>/."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diffcap.stages import Request


def extract_features(request: "Request") -> None:
    """Extract the missing features, write the record, print the store's path."""
    from diffcap import record
    from diffcap.features.images import ImageData
    from diffcap.lit.extraction import Extraction, extract
    from diffcap.lit.stage_cli import StageCLI
    from diffcap.stages import STAGES

    cli = StageCLI(
        Extraction,
        ImageData,
        save_config_callback=None,  # the store's meta.json has the settings
        trainer_defaults={"logger": False, "enable_checkpointing": False, "use_distributed_sampler": False},
        args=request,  # type: ignore[arg-type]
    )
    folder, extracted = extract(cli.trainer, cli.model, cli.datamodule)
    if not cli.trainer.is_global_zero:
        return
    what = "image files read" if cli.model.from_files else "images extracted"
    print(f"{folder}: {f'complete, {extracted:,} {what}' if extracted else 'already complete'}.")
    options = cli.config["model"].as_dict()
    files = record.describe_files([*request.inputs, *record.named_files(options)], {})
    products = [folder / name for name in STAGES["extract"].products]
    made = record.make(request.asked, record.result_id(options, files), files, products)
    record.write(folder / "extract.done.json", made)
