"""The LightningDataModule of self-critical training: pairs, and the random numbers from which their captions are sampled."""

from typing import Any

import torch

from diffcap.data.datamodules import CaptionData
from diffcap.data.sampler import Batch, step_generator
from diffcap.utils.errors import DiffcapError


class ReinforceData(CaptionData):
    """Pairs, and random numbers for sampling their captions.

    Args:
        folder: the dataset's folder, with `manifest.jsonl`.
        features: name of the feature store in its `features/`.
        draws: captions sampled for each pair (Luo: 5).
        settings: see `CaptionData`; with samples "scenes" `batch_size` is a number of scenes with two pairs each.

    Raises:
        DiffcapError: `draws` is less than 1; and see `FeatureData`.
    """

    def __init__(self, folder: str, features: str, draws: int = 5, **settings: Any) -> None:
        super().__init__(folder, features, **settings)
        if draws < 1:
            raise DiffcapError(f"data.draws is {draws}; it must be at least 1.")
        self.draws = draws

    def make_batch(self, step: int) -> Batch:
        """See `FeatureData`: `before`, `after`, `pair` (B,), and `draws` (B, K, T - 1), uniform in [0, 1).

        The numbers are drawn for the global batch, so that a pair's captions do not depend on the number of ranks.
        """
        generator = step_generator(self.seed, step)
        pairs = self.sample_pairs[self.epochs.take(step * self.batch_size, self.batch_size)]  # (b,) or (b, 2)
        draws = torch.rand(*pairs.shape, self.draws, self.max_length - 1, generator=generator)
        batch = self._add_images({"pair": torch.from_numpy(pairs), "draws": draws}, pairs, generator)
        if pairs.ndim == 2:  # in the order of the images: all change pairs, then all distractor pairs
            batch |= {key: batch[key].transpose(0, 1).flatten(0, 1) for key in ("pair", "draws")}
        return batch
