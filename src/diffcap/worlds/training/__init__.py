"""Training of the networks that ship with the package for `blocks`; only maintainers need it."""
