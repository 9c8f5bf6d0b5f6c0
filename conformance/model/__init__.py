"""A whole model on a backend: one prompt and the tokens after it, compared with llama.cpp on its own CPU."""
