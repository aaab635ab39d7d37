"""Trained heads: their networks and their file formats."""
