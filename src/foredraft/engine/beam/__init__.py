"""Beam search, plain and speculative."""
