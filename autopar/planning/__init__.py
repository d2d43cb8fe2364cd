"""Plans for people: explained, compared, checked, simulated, kept in files."""
