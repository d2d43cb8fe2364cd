"""The compiler's passes: a pass is a file is a verb. See `autopar.compile` for their order."""
