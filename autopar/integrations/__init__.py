"""Adapters that speak the language of a library; nothing else of autopar imports one. Each module needs its library."""
