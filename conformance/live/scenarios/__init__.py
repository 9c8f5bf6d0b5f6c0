"""Scenarios: two ways through llama.cpp's public functions that must give equal logits, on one library and device."""
