"""The papers' losses as pure functions of tensors, one loss per file."""
