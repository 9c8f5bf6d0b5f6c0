"""One invocation: what it selects, its settings, its seeds, and what it has on disk."""
