"""The ggml vocabulary: types, tensors, graphs, the builder, cases and case files. Imports nothing else of ours."""
