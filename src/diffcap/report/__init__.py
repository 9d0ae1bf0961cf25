"""What people look at once the runs are done: a table of systems, and pictures of pairs with their captions."""
