"""What a backend is: the interface, the registry, and the bases that make an adapter short."""
