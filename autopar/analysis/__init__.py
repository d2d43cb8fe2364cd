"""Facts that are found by walking a Program."""
