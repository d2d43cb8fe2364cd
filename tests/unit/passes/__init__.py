"""Passes, on Programs written by hand."""
