"""Fill the store data/<dataset>/features/<name>: extract the features of all images, or import those that authors released."""

from pathlib import Path
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


def import_features(folder: str, source: str, name: str = "authors") -> None:
    """Fill data/<dataset>/features/<name> from the authors' files, one `.npy` per image or IDC-PCL's pickles; needs no images.

    Args:
        folder: Folder of the dataset, with its manifest.
        source: Folder of the authors' features (features/, sc_features/, nsc_features/ of SCORER and DIRL, full/ of IDC-PCL).
        name: Name of the feature store.
    """
    from diffcap.features.authors import fill_store
    from diffcap.records import read_dataset

    store = Path(folder) / "features" / name
    imported = fill_store(read_dataset(folder), source, store)
    print(f"{store}: {f'complete, {imported:,} images imported from {source}' if imported else 'already complete'}.")
