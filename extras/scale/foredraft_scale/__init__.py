"""Replicas of the server and actors of offline batches, on Ray."""
