"""One invocation: its selection, its settings, its seeds and its files."""
