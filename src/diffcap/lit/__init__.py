"""The LightningModules, one a stage."""
