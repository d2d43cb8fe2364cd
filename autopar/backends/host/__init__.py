"""The parameter server on hosts: tables in host memory, owned by ranks, and steps that run in segments around them."""
