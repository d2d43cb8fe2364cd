"""Exchanges between the ranks of an MPI job.

The one package that imports mpi4py, and only inside functions: importing autopar starts no MPI.
"""
