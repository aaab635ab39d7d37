"""Sampling parameters and the law that they make of logits."""
