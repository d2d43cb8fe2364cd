"""How `localize` writes each equation."""
