"""The embedded dataset: scenes of simple solids, rendered, changed and described."""
