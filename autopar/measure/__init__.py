"""Figures that are measured rather than declared."""
