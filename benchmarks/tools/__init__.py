"""Programs beside the experiments."""
