"""The documentation: pages and notebooks say what is so."""
