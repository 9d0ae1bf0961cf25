"""Reports on evaluated runs: a table of systems, and images of pairs with their captions."""
