"""A target that drafts over a part of its own KV cache."""
