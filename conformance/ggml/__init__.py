"""ggml's vocabulary: types, tensors, graphs, ops, quantisation. Imports nothing outside this package."""
