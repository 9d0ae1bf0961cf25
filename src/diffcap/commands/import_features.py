"""Import features that the authors of a method released: one `.npy` file per image, or IDC-PCL's pickles."""

from collections.abc import Sequence
from pathlib import Path

from diffcap.utils.console import run


def import_features(folder: str, source: str, name: str = "authors") -> None:
    """Fill data/<dataset>/features/<name> from the authors' files; the images are not needed.

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


def main(arguments: Sequence[str]) -> None:
    """Run the stage with its own options."""
    run(import_features, arguments)
