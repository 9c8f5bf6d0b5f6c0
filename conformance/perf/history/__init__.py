"""Performance and verdicts over time."""
