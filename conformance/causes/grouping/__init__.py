"""Failures of one backend, grouped by what is at fault."""
