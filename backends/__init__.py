"""Adapters, one package per system, found by entry point; none imports the suite."""
