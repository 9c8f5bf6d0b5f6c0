"""A whole model on a backend: one prompt and the tokens after it, held against llama.cpp on its own CPU."""
