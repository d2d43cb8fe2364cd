"""What `once_per_row` looks for."""
