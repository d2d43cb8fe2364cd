"""The state: made, saved, restored."""
