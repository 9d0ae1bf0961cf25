"""Features that a system's authors handed out into a dataset's feature store: `.npy` an image, or IDC-PCL's pickles."""

from collections.abc import Sequence
from pathlib import Path

from diffcap.utils.console import run


def take_over(folder: str, source: str, name: str = "authors") -> None:
    """Fill data/<dataset>/features/<name> from the authors' files instead of from the images, which need not be there.

    Args:
        folder: the dataset's folder, with its manifest.
        source: folder of the authors' features (features/, sc_features/, nsc_features/ of SCORER and DIRL, full/ of IDC-PCL).
        name: what the features are called.

    Raises:
        DiffcapError: a file is missing or holds something else than arrays.
    """
    from diffcap.features.authors import fill_store
    from diffcap.records import read_dataset

    store = Path(folder) / "features" / name
    taken = fill_store(read_dataset(folder), source, store)
    print(f"{store}: {f'complete, {taken:,} images taken from {source}' if taken else 'already complete'}.")


def main(arguments: Sequence[str]) -> None:
    """Run the stage with its own options."""
    run(take_over, arguments)
