"""Training data: sources, tokens, batches, features, regeneration by the target."""
