"""ggml's vocabulary: types, tensors, graphs, ops, quantisation. Imports nothing else of ours."""
