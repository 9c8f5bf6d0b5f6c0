"""Backends: the interface, the registry, and base classes that make an adapter short."""
