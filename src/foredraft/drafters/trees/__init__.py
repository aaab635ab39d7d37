"""Draft trees: their shapes, and what builds them level by level."""
