"""The functions that the console commands call with their options. Heavy packages such as torch are imported only when a command runs."""
