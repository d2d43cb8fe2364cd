"""What is measured rather than declared."""
