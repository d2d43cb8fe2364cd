"""From a lifted Program to a function that JAX compiles."""
