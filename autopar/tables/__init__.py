"""Leaves of a state that are no arrays."""
