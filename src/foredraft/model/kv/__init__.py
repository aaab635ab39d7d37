"""The slot cache of keys and values, and the addresses of tree nodes in it."""
