"""Reader of Shapes: captions.tsv, a line for each pair with split, first image, second image and caption."""

from pathlib import Path

from diffcap.records import ChangePair
from diffcap.utils.errors import DiffcapError


def read(folder: Path) -> list[ChangePair]:
    """Read captions.tsv; image paths in it are relative to the folder."""
    path = folder / "captions.tsv"
    pairs = []
    for line_number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        cells = line.split("\t")
        if len(cells) != 4:
            raise DiffcapError(
                f"{path}, line {line_number}: {len(cells)} cells, not 4; write split, two images and a caption."
            )
        split, before, after, caption = cells
        pairs.append(ChangePair(Path(before).stem, before, after, [caption], split))
    return pairs
