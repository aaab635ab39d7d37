"""Run arms against each other and record what they did."""
