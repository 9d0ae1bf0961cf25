"""From pairs to batches: tables of the pairs of a split, samplers, and one LightningDataModule per training stage."""
