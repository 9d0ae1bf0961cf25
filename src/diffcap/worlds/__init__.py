"""The embedded datasets `blocks` and `tiles`: scenes, rendering, captions, and the training of the networks that ship for them."""
