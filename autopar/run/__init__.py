"""Who calls a compiled step."""
