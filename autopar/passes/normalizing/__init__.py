"""What `normalize` does."""
