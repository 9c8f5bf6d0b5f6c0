"""Isolate a backend: workers, limits, and checks of the files that it loads."""
