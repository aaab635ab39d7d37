"""Turns names into objects: specs, targets, drafters, generators."""
