"""Training of the networks that the package contains for the rendered datasets `blocks` and `tiles`; only maintainers need it."""
