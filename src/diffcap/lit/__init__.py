"""The LightningModules, one per training stage."""
