"""The adapters, one package per system; each is found through its entry point and imports no part of the suite."""
