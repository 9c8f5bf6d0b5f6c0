"""Builds of ggml and llama.cpp that anyone ships: found by any name they go by, and asked what they hold."""
