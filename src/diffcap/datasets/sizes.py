"""How large the released datasets are: a whole one must have these sizes, a part is told as what it is."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from diffcap.errors import DiffcapError
from diffcap.records import ChangePair


class Size(NamedTuple):
    """Records by split, where the papers name them, and classes, where there are any."""

    records: int
    splits: dict[str, int]
    classes: int = 0


SIZES = {
    "cub": Size(11_788, {"train": 8_855, "val": 2_933}),  # L2C's split, which is by class (Yan et al., ACL 2021)
    "nabirds": Size(48_562, {"train": 23_929, "test": 24_633}, classes=555),
}


def against_official(dataset: str, pairs: Sequence[ChangePair]) -> str:
    """A sentence about how much of the released dataset this is; "" where nobody counted it.

    Raises:
        DiffcapError: it is as large as the whole, but not made up like it.
    """
    size = SIZES.get(dataset)
    if size is None:
        return ""
    splits = Counter(pair.split for pair in pairs)
    classes = len({pair.extra["class"] for pair in pairs if "class" in pair.extra})
    found = {**{name: splits[name] for name in size.splits}, **({"classes": classes} if size.classes else {})}
    wanted = {**size.splits, **({"classes": size.classes} if size.classes else {})}
    if len(pairs) < size.records:
        return f"{dataset}: a part, {len(pairs):,} of its {size.records:,} images ({_listed(found)})"
    if len(pairs) > size.records or found != wanted:
        raise DiffcapError(
            f"{dataset}: {len(pairs):,} images ({_listed(found)}), where the released one has {size.records:,} "
            f"({_listed(wanted)}); fetch its lists again."
        )
    return f"{dataset}: the whole of its {size.records:,} images ({_listed(found)})"


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items())
