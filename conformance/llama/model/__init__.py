"""Checks a whole model on a backend against llama.cpp on its own CPU."""
