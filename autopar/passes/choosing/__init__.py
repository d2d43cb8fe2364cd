"""Parts of `choose`."""
