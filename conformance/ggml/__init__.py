"""ggml's types, tensors, graphs, ops and quantisation; imports no other package of ours."""
