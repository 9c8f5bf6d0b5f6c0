"""Does the suite notice bugs? Faults of a list and mutants, one at a time, in an adapter that runs in its own process.

`faults` reads the list, `mutants` draws changes that nobody chose, `inject` runs an adapter with changed sources.
`hunt` finds the cases that notice a change and those whose answers differ by it; `python -m tests.trust` runs all.
"""
