"""Judges servers of llama.cpp: their slots, caches and memory."""
