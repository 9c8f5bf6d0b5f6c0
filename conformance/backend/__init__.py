"""Backends: the interface, the registry, and base classes for short adapters."""
