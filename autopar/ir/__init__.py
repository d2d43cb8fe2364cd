"""The intermediate representation of a train step, its row-space facts, its printer and its verifier."""
