"""What tests shard: programs, steps, settings, comparisons. No test is here."""
