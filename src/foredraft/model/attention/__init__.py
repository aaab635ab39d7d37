"""Attention over slots: transformers' interface, and a kernel for trees."""
