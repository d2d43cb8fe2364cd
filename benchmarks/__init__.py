"""Benchmarks: ratios measured in one run, both sides alternating, medians. `python -m benchmarks`."""
