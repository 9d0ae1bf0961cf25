"""Reader of `tiles`: the files of LEVIR-CC (`diffcap.datasets.levir_cc`), and `facts.json` (`diffcap.worlds.tiles.write`)."""

from dataclasses import replace
from pathlib import Path

from diffcap.datasets import levir_cc
from diffcap.datasets.karpathy import notes
from diffcap.records import ChangePair, read_json
from diffcap.utils.errors import DiffcapError

__all__ = ["notes", "read"]


def read(folder: Path) -> list[ChangePair]:
    """Read the pairs in the order of LevirCCcaptions.json, with change type, boxes, mask and facts."""
    path = folder / "facts.json"
    facts = read_json(path, "facts")
    pairs = []
    for pair in levir_cc.read(folder, all_masks=True):
        entry = facts.get(pair.id) if isinstance(facts, dict) else None
        if not isinstance(entry, dict):
            raise DiffcapError(f"{path}: has no object for the pair {pair.id!r}; render the folder again.")
        extra = {key: entry[key] for key in ("boxes", "facts") if key in entry}
        pairs.append(replace(pair, change_type=entry.get("change_type"), extra={**pair.extra, **extra}))
    return pairs
