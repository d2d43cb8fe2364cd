"""Starts ranks, and says which one failed."""
