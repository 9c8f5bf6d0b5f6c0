"""Judge results: tolerances, comparison, verdicts, waivers."""
