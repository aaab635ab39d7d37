"""Packed linear layers for CPUs."""
