"""Starting ranks, and what is done when one of them fails."""
