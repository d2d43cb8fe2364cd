"""Servers that keep a state, and the workers that train it by messages (`autopar.sync.Async`)."""
