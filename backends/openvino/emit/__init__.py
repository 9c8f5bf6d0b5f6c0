"""Emitters: one module per topic of ops, as in `conformance.ggml.ops`."""
