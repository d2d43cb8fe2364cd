"""Adapters to other libraries; nothing else of autopar imports one. Each module needs its library."""
