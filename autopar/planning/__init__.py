"""Plans for people: explained, compared, checked, simulated, and kept in files."""
