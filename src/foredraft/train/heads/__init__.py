"""Training recipes of heads on a frozen target."""
