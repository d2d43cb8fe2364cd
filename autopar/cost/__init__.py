"""What things cost: pure functions with units and sources."""
