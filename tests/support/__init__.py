"""What tests share: programs, steps, settings, comparisons. No test is here."""
