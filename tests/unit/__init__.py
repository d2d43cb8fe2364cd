"""Tests of single parts, laid out as the package is."""
