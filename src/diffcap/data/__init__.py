"""The road of pairs into batches: tables of a split, the streams that draw from them, a LightningDataModule a stage."""
