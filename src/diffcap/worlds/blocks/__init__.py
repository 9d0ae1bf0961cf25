"""`blocks`: rendered scenes of simple solids before and after a change, with captions, in files like those of CLEVR-Change."""
