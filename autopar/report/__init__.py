"""Reports on a plan: bytes by method, times and limits of a step, as figures, tables and a page."""
