"""A room for each way to run a step. `table` lists them; nobody else names one (docs/design.md, *Ways*)."""
