"""Says where the batches of `shard` come from, and which part of each a process reads."""
