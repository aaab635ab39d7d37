"""The target drafts without some of its layers, and the search for these (arXiv:2309.08168)."""
