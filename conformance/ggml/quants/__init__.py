"""Values in and out of ggml's types, bit for bit."""
