"""Training of the networks that ship with the package for `blocks` and `tiles`; only maintainers need it."""
