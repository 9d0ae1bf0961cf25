"""The rendered datasets `blocks` and `tiles`: scenes, rendering, captions, and the training of small networks for them."""
