"""Helpers shared by several drafters: draft runners, feature caches, tree building, templates."""
