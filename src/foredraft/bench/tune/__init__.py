"""Find the best drafter and size for a machine."""
