"""Parts of `choose`: what it decides by."""
