"""MPI: the world of processes, and what they exchange.

The one package that imports mpi4py, and only inside functions: without an MPI launcher no MPI is started.
"""
