"""What ranks run, and what starts them."""
