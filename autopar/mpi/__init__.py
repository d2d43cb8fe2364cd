"""MPI: the world of processes, what they exchange, and what is done when one of them dies.

The one package that imports mpi4py, and only inside functions: without an MPI launcher no MPI is started.
"""
