"""The one ctypes binding of ggml and llama.cpp: found, loaded, and checked before anything relies on it."""
