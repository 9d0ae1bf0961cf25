"""The pairs of a split with their features and captions: the table that training draws from and decoding walks through."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from diffcap.data.sampler import Batch, step_generator
from diffcap.errors import DiffcapError
from diffcap.features.store import FeatureStore
from diffcap.records import ChangePair
from diffcap.text.vocabularies import AnyVocabulary


class PairTable:
    """The pairs of one split with their rows in the feature store and their captions as ids.

    Args:
        pairs: the split's pairs. store: where their features are. vocabulary, max_length: of the captions.

    Attributes:
        ids, is_change: of each pair. images_each: 2, or 1 of single images, which have no "after".
        tokens: (captions, T) padded ids. owner: (captions,) the pair of each caption.
        counts, first: (pairs,) captions of each pair, and the number of its first one.
    """

    def __init__(
        self, pairs: Sequence[ChangePair], store: FeatureStore, vocabulary: AnyVocabulary, max_length: int
    ) -> None:
        self.store, self.vocabulary, self.max_length = store, vocabulary, max_length
        self.ids = [pair.id for pair in pairs]
        self.is_change = np.array([not pair.is_distractor for pair in pairs])
        self.images_each = len(pairs[0].images)
        if any(len(pair.images) != self.images_each for pair in pairs):
            raise DiffcapError(
                "the manifest has pairs and single images side by side; keep them in datasets of their own."
            )
        columns = zip(*(pair.images for pair in pairs))
        self.rows = np.stack([store.rows(column) for column in columns], 1)  # (pairs, 2), or (pairs, 1)
        self.captions = [caption for pair in pairs for caption in pair.captions]
        self.owner = np.repeat(np.arange(len(pairs)), [len(pair.captions) for pair in pairs])
        self.tokens = self.encode(self.captions)
        self.counts = np.bincount(self.owner, minlength=len(pairs))
        self.first = np.cumsum(self.counts) - self.counts
        self.swapped = self._other_roles(pairs)

    def encode(self, captions: Sequence[str]) -> np.ndarray:
        """Sentences to padded ids, (captions, max_length)."""
        row_of = {caption: row for row, caption in enumerate(dict.fromkeys(captions))}  # many stand in many places
        tokens = np.full((len(row_of), self.max_length), self.vocabulary.pad, dtype=np.int32)
        for caption, row in row_of.items():
            ids = self.vocabulary.encode(caption, self.max_length)
            tokens[row, : len(ids)] = ids
        return tokens[[row_of[caption] for caption in captions]]

    def _other_roles(self, pairs: Sequence[ChangePair]) -> np.ndarray:
        """Rows with the default and the nonsemantic image swapped; where a scene has no distractor, as they are.

        Change (default, semantic) becomes (nonsemantic, semantic), distractor (default, nonsemantic) becomes
        (nonsemantic, default): the augmentation of SCORER and DIRL.
        """
        view = {pair.before: row for pair, row in zip(pairs, self.rows[:, -1]) if pair.is_distractor}
        swapped = self.rows.copy()
        for number, pair in enumerate(pairs):
            if pair.before in view:
                swapped[number] = (view[pair.before], self.rows[number, 0 if pair.is_distractor else 1])
        return swapped

    def images(self, pairs: np.ndarray, swap: np.ndarray | None = None) -> Batch:
        """Feature maps of some pairs, {"before", "after"}: float32 (B, C, h, w) each; pixels stay uint8.

        Single images have "before" only.

        Args:
            pairs: (B,), or (b, 2) for two pairs of one scene, whose first images are one: then "before" has b maps and
                "after" 2 b, those of the first pairs in front.
            swap: (B,) or (b,): which have default and nonsemantic image swapped.
        """
        columns = pairs[:, None] if pairs.ndim == 1 else pairs
        rows = self.rows[columns]  # (b, 1 or 2, 2), or (b, 1, 1)
        if swap is not None:
            rows = np.where(swap[:, None, None], self.swapped[columns], rows)
        wanted = np.concatenate([rows[:, 0, 0], rows[:, :, 1:].T.reshape(-1)])
        maps = torch.from_numpy(self.store.read(wanted))
        if maps.dtype != torch.uint8:
            maps = maps.float()
        images = {"before": maps[: len(pairs)]}
        return images if self.images_each == 1 else {**images, "after": maps[len(pairs) :]}

    def scenes(self) -> np.ndarray:
        """The change pair and the distractor pair of each scene that has both: (scenes, 2)."""
        view = {self.rows[number, 0]: number for number in np.flatnonzero(~self.is_change)}
        changes = [number for number in np.flatnonzero(self.is_change) if self.rows[number, 0] in view]
        return np.array([(number, view[self.rows[number, 0]]) for number in changes], dtype=np.int64).reshape(-1, 2)

    def draw_captions(self, pairs: np.ndarray, generator: torch.Generator) -> np.ndarray:
        """One caption of each pair by chance, ids of the same shape and (..., T)."""
        draw = torch.rand(pairs.shape, generator=generator, dtype=torch.float64).numpy()
        return self.tokens[self.first[pairs] + (draw * self.counts[pairs]).astype(np.int64)]

    def longest(self, tokens: np.ndarray) -> int:
        """Positions that the longest of the captions (..., T) needs."""
        return int((tokens != self.vocabulary.pad).any(tuple(range(tokens.ndim - 1))).sum())


class PairBatches(Dataset):
    """The pairs of a split in order, batches of them, for decoding; with `mask`, for validation with the first caption.

    Args:
        table: the pairs. mask: from padded ids to the batch's text entries. limit: only the first pairs.
    """

    def __init__(
        self,
        table: PairTable,
        mask: Callable[[np.ndarray, torch.Generator], Batch] | None = None,
        limit: int | None = None,
    ) -> None:
        if mask is None and table.images_each == 1:
            raise DiffcapError("these are single images, with no pair to caption; give a dataset of pairs.")
        self.table = table
        self.count = min(limit or len(table.ids), len(table.ids))
        # All at once: which words are hidden must not depend on how the pairs fall into batches or on ranks.
        self.text = mask(table.tokens[table.first[: self.count]], step_generator(0, 0)) if mask else {}

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Batch:
        return self.__getitems__([index])

    def __getitems__(self, indices: list[int]) -> Batch:
        pairs = np.array(indices)
        return {
            "id": [self.table.ids[index] for index in indices],
            "number": torch.from_numpy(pairs),
            "is_change": torch.from_numpy(self.table.is_change[pairs]).long(),
            **self.table.images(pairs),
            **{key: value[pairs] for key, value in self.text.items()},
        }


class RetrievalBatches(Dataset):
    """The pairs of a split that show a change, in order, batches of them with all their captions.

    Args:
        table: the pairs. limit: only the first of those pairs.
    """

    def __init__(self, table: PairTable, limit: int | None = None) -> None:
        self.table = table
        self.pairs = np.flatnonzero(table.is_change & (table.counts > 0))[:limit]

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> Batch:
        return self.__getitems__([index])

    def __getitems__(self, indices: list[int]) -> Batch:
        table, pairs = self.table, self.pairs[indices]
        texts = np.concatenate([np.arange(table.first[pair], table.first[pair] + table.counts[pair]) for pair in pairs])
        return {
            "number": torch.from_numpy(pairs),
            "texts": torch.from_numpy(table.tokens[texts]).long(),
            "text_number": torch.from_numpy(texts),
            "text_owner": torch.from_numpy(table.owner[texts]),
            **table.images(pairs),
        }


def identity_collate(batch: Any) -> Any:
    """Collation of batches that are batches already."""
    return batch
