"""Fill the feature store data/<dataset>/features/<name>: extract the features of all images, or import features that authors published."""

from pathlib import Path

from diffcap import record
from diffcap.records import read_dataset
from diffcap.stages import STAGES, Request


def extract_features(request: Request) -> None:
    """Extract the missing features. If the store is then complete, write the record of this stage (`extract.done.json`)."""
    from diffcap.features.images import ImageData
    from diffcap.lit.extraction import Extraction, extract
    from diffcap.lit.stage_cli import StageCLI

    cli = StageCLI(
        Extraction,
        ImageData,
        trainer_defaults={"logger": False, "enable_checkpointing": False, "use_distributed_sampler": False},
        args=request,  # type: ignore[arg-type]
    )
    store, num_images, num_left = extract(cli.trainer, cli.model, cli.datamodule)
    if not cli.trainer.is_global_zero:
        return
    if num_left:
        print(f"{store}: {num_images:,} images extracted, {num_left:,} are left to the other shards.")
        return
    unit = "image files read" if cli.model.from_files else "images extracted"
    print(f"{store}: {f'complete, {num_images:,} {unit}' if num_images else 'already complete'}.")
    options = cli.config["model"].as_dict()
    input_files = record.describe_files([*request.inputs, *record.named_files(options)], {})
    product_files = [store / name for name in STAGES["extract"].products]
    stage_record = record.make(request.asked, record.result_id(options, input_files), input_files, product_files)
    record.write(store / "extract.done.json", stage_record)


def import_features(folder: str, source: str, name: str = "authors") -> None:
    """Fill data/<dataset>/features/<name> from the authors' files: one `.npy` file per image, or IDC-PCL's pickle files.

    Args:
        folder: Folder of the dataset, with its manifest.
        source: Folder of the authors' features (features/, sc_features/, nsc_features/ of SCORER and DIRL, full/ of IDC-PCL).
        name: Name of the feature store.
    """
    from diffcap.features.authors import fill_store

    store = Path(folder) / "features" / name
    num_images = fill_store(read_dataset(folder), source, store)
    state = f"complete, {num_images:,} images imported from {source}" if num_images else "already complete"
    print(f"{store}: {state}.")
