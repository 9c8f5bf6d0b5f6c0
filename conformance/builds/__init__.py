"""Locate and inspect published builds of ggml and llama.cpp."""
