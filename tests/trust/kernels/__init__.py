"""Mutants of ggml's own kernels, judged by this suite and by llama.cpp's test-backend-ops.

One build holds all mutants of a draw; an environment variable activates one of them.
"""
