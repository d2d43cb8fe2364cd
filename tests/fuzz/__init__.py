"""Random programs by fresh seeds: `python -m tests.fuzz` (`make fuzz`). CONTRIBUTING.md says how it is used."""
