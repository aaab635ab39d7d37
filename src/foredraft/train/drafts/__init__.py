"""Training recipes of draft models: distillation, pruning, boosting."""
