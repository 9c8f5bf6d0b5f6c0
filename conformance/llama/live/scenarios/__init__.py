"""API scenarios: two call sequences of llama.cpp that must give equal logits."""
