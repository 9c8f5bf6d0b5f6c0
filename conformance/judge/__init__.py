"""Error budgets, comparing and verdicts."""
