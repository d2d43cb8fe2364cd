"""Batches of `shard`: their sources, and the part of each that a process reads."""
