"""Servers that keep a state, and the workers that train it (`autopar.sync.Async`): in messages."""
