"""The pairs of a split with their features and captions, and the datasets for decoding and retrieval.

A scene has a "default" image and two later images: the "semantic" one with a change, and the "nonsemantic" one without. Its change
pair is (default, semantic), and its distractor pair (default, nonsemantic). Most datasets have only change pairs.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from diffcap.data.sampler import Batch, step_generator
from diffcap.data.workers import read_maps
from diffcap.features.store import FeatureStore
from diffcap.models.change_head import UNKNOWN_TYPE
from diffcap.records import ChangePair
from diffcap.text.vocabularies import AnyVocabulary
from diffcap.utils.errors import DiffcapError


class PairTable:
    """The pairs of one split with their rows in the feature store and their captions as ids."""

    def __init__(
        self,
        pairs: Sequence[ChangePair],
        store: FeatureStore,
        vocabulary: AnyVocabulary,
        max_length: int,
        change_types: Sequence[str] = (),
    ) -> None:
        self.store = store
        self.vocabulary = vocabulary
        self.max_length = max_length
        self.ids = [pair.id for pair in pairs]
        self.is_change = np.array([not pair.is_distractor for pair in pairs])
        self.change_type = np.full(len(pairs), UNKNOWN_TYPE)  # index in `change_types`
        for index, pair in enumerate(pairs):
            if pair.change_type in change_types and not pair.is_distractor:
                self.change_type[index] = change_types.index(pair.change_type)
        self.images_per_pair = len(pairs[0].images)  # 2, or 1 for single images, which have no "after"
        if any(len(pair.images) != self.images_per_pair for pair in pairs):
            raise DiffcapError("the manifest has both pairs and single images; put them into separate datasets.")
        columns = zip(*(pair.images for pair in pairs))
        self.store_rows = np.stack([store.rows(column) for column in columns], 1)  # (pairs, images_per_pair)
        self.captions = [caption for pair in pairs for caption in pair.captions]
        self.caption_counts = np.array([len(pair.captions) for pair in pairs])  # (pairs,)
        self.caption_pair = np.repeat(np.arange(len(pairs)), self.caption_counts)  # (captions,) index of the pair
        self.first_caption = np.cumsum(self.caption_counts) - self.caption_counts  # (pairs,) index in `captions`
        distinct_tokens, caption_rows = self.encode_distinct(self.captions)
        self.tokens = distinct_tokens[caption_rows]  # (captions, T) padded ids
        # `store_rows` with the default and the nonsemantic image swapped, in scenes that have both images (SCORER, DIRL)
        self.swapped_store_rows = self.store_rows.copy()
        nonsemantic_rows = {pair.before: row for pair, row in zip(pairs, self.store_rows[:, -1]) if pair.is_distractor}
        for index, pair in enumerate(pairs):
            if pair.before in nonsemantic_rows:
                other_row = self.store_rows[index, 0 if pair.is_distractor else 1]
                self.swapped_store_rows[index] = (nonsemantic_rows[pair.before], other_row)

    def encode_distinct(self, captions: Iterable[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return the padded ids of the distinct captions, (d, max_length), and the row of each caption's ids in it, (captions,)."""
        row_of: dict[str, int] = {}  # caption -> its row; many captions are repeated
        caption_rows = np.fromiter((row_of.setdefault(caption, len(row_of)) for caption in captions), np.int32)
        id_type = np.int16 if len(self.vocabulary) < 2**15 else np.int32
        tokens = np.full((len(row_of), self.max_length), self.vocabulary.pad, dtype=id_type)
        for caption, row in row_of.items():
            ids = self.vocabulary.encode(caption, self.max_length)
            tokens[row, : len(ids)] = ids
        return tokens, caption_rows

    def cut_captions(self) -> tuple[int, int]:
        """Return the number of captions that `max_length` cuts, and the `max_length` that would keep all of them."""
        is_full = (self.tokens[:, -2:] != self.vocabulary.pad).any(1)  # some vocabularies leave the last position empty
        num_cut = 0
        needed_length = self.max_length
        for caption, count in Counter(caption for caption, full in zip(self.captions, is_full) if full).items():
            whole_ids = self.vocabulary.encode(caption, 1_000_000)  # this limit cuts no caption
            if whole_ids != self.vocabulary.encode(caption, self.max_length):
                num_cut += count
                lengths = (len(whole_ids), len(whole_ids) + 1)
                length = next(length for length in lengths if self.vocabulary.encode(caption, length) == whole_ids)
                needed_length = max(needed_length, length)
        return num_cut, needed_length

    def images(self, pair_indices: np.ndarray, is_swapped: np.ndarray | None = None) -> Batch:
        """Return the feature maps of some pairs, {"before", "after"}: (B, C, h, w) each, in the store's type (float16 or uint8).

        Single images have no "after".

        Args:
            pair_indices: (B,), or (b, 2) for the two pairs of each of b scenes, which have the same before image. Then "before" has
                b maps, and "after" has 2 b maps: those of all first pairs, then those of all second pairs.
            is_swapped: (B,) or (b,) boolean, True where the default and the nonsemantic image are swapped.
        """
        scenes = pair_indices[:, None] if pair_indices.ndim == 1 else pair_indices
        rows = self.store_rows[scenes]  # (b, 1 or 2, 2), or (b, 1, 1) for single images
        if is_swapped is not None:
            rows = np.where(is_swapped[:, None, None], self.swapped_store_rows[scenes], rows)
        maps = read_maps(self.store, np.concatenate([rows[:, 0, 0], rows[:, :, 1:].T.reshape(-1)]))
        images = {"before": maps[: len(scenes)]}
        return images if self.images_per_pair == 1 else {**images, "after": maps[len(scenes) :]}

    def scenes(self) -> np.ndarray:
        """Return the indices of the change pair and the distractor pair of each scene that has both: (scenes, 2)."""
        befores = self.store_rows[:, 0]
        distractors = {befores[index]: index for index in np.flatnonzero(~self.is_change)}
        changes = [index for index in np.flatnonzero(self.is_change) if befores[index] in distractors]
        return np.array([(index, distractors[befores[index]]) for index in changes], dtype=np.int64).reshape(-1, 2)

    def draw_captions(self, pair_indices: np.ndarray, generator: torch.Generator) -> np.ndarray:
        """Return the ids of one random caption of each pair: (..., T) for `pair_indices` of the shape (...)."""
        fractions = torch.rand(pair_indices.shape, generator=generator, dtype=torch.float64).numpy()
        offsets = (fractions * self.caption_counts[pair_indices]).astype(np.int64)
        return self.tokens[self.first_caption[pair_indices] + offsets]

    def longest_length(self, tokens: np.ndarray) -> int:
        """Return the length of the longest of the captions (..., T), without padding."""
        return int((tokens != self.vocabulary.pad).any(tuple(range(tokens.ndim - 1))).sum())


class PairDataset(Dataset):
    """The first `limit` pairs of a split in order. Indexing with a list of indices gives a whole batch.

    For validation, `make_text_entries` turns the padded ids of each pair's first caption into entries, such as "tokens".
    """

    def __init__(
        self,
        table: PairTable,
        make_text_entries: Callable[[np.ndarray, torch.Generator], Batch] | None = None,
        limit: int | None = None,
    ) -> None:
        if make_text_entries is None and table.images_per_pair == 1:
            raise DiffcapError("the dataset has single images, which cannot be captioned; give a dataset of pairs.")
        self.table = table
        self.num_pairs = min(limit or len(table.ids), len(table.ids))
        self._text_entries = {}
        # Entries are made for all pairs at once, so that the masked words depend neither on the batch size nor on the number of ranks.
        if make_text_entries is not None:  # None for decoding, where pairs need no captions
            tokens = table.tokens[table.first_caption[: self.num_pairs]]
            self._text_entries = make_text_entries(tokens, step_generator(0, 0))

    def __len__(self) -> int:
        return self.num_pairs

    def __getitems__(self, indices: list[int]) -> Batch:
        pair_indices = np.array(indices)
        return {
            "id": [self.table.ids[index] for index in indices],
            "number": indices,  # indices of the pairs in the split; a list, so that no value has to be read from a GPU
            "is_change": torch.from_numpy(self.table.is_change[pair_indices]).long(),
            "change_type": torch.from_numpy(self.table.change_type[pair_indices]),
            **self.table.images(pair_indices),
            **{key: value[pair_indices] for key, value in self._text_entries.items()},
        }


class RetrievalDataset(Dataset):
    """The first `limit` change pairs of a split in order, each with all its captions. Indexing with a list gives a whole batch."""

    def __init__(self, table: PairTable, limit: int | None = None) -> None:
        self.table = table
        self.pair_indices = np.flatnonzero(table.is_change & (table.caption_counts > 0))[:limit]

    def __len__(self) -> int:
        return len(self.pair_indices)

    def __getitems__(self, indices: list[int]) -> Batch:
        table = self.table
        pair_indices = self.pair_indices[indices]
        starts = table.first_caption[pair_indices]
        counts = table.caption_counts[pair_indices]
        caption_indices = np.concatenate([np.arange(start, start + count) for start, count in zip(starts, counts)])
        return {
            "number": torch.from_numpy(pair_indices),  # index of the pair in the split
            "texts": torch.from_numpy(table.tokens[caption_indices]).long(),
            "text_number": torch.from_numpy(caption_indices),  # index of the caption in the split
            "text_pair_number": torch.from_numpy(table.caption_pair[caption_indices]),  # "number" of its pair
            **table.images(pair_indices),
        }


def maps_as_float(batch: Batch) -> Batch:
    """Convert a batch's feature maps from float16 to float32 on the device, so that only half the bytes are copied to it.

    "before" and "after" are tensors, or lists of tensors for an ensemble of captioners. Pixels, uint8, are not converted.
    """

    def to_float(maps: Any) -> Any:
        if isinstance(maps, list):
            return [to_float(member) for member in maps]
        return maps.float() if maps.dtype == torch.float16 else maps

    return {key: to_float(value) if key in ("before", "after") else value for key, value in batch.items()}


def identity_collate(batch: Any) -> Any:
    """Collate function of datasets that return whole batches."""
    return batch
