"""Parts of `localize`: how it writes each equation."""
