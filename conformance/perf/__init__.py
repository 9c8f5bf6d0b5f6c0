"""Measures the speed of backends."""
