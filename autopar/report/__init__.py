"""Reports on a plan: what each method sends, what a step takes and why, as figures, tables and a page."""
