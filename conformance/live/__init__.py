"""What is no graph of ours: llama.cpp run as a whole, and questions to backends; `run.live` has their protocol."""
