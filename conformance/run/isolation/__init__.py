"""Isolate a backend: workers, limits and checks of what it loads."""
