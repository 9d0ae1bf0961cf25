"""Caption metrics, protocols and slot accuracy, independent of Lightning."""
