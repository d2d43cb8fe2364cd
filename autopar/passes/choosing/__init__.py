"""What `choose` decides by."""
