"""Every op of ggml: what its constructors make and assert."""
