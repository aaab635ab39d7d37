"""Sampling parameters, and the conversion of logits to probabilities."""
