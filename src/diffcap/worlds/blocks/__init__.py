"""`blocks`: rendered scenes of simple solids before and after a change, with captions, in CLEVR-Change's official layout."""
