"""Trainable modules of draft heads: tensors in, tensors out; they never decode or sample."""
