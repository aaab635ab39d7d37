"""Trainable heads: tensors in, tensors out. They never decode, sample, or know where their weights came from."""
