"""Drafts by a part of the target itself: a part of its KV cache, or some of its layers."""
