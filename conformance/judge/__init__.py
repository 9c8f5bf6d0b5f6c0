"""Judge results: error budgets, comparison, verdicts, waivers."""
