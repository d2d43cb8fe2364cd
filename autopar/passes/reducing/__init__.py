"""The bodies of `reduce_tables`."""
