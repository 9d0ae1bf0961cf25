"""What the console commands do once their options are read; nothing heavy is imported before a command runs."""
