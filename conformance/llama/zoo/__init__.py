"""The zoo: graphs of every architecture, recorded from llama.cpp with random weights."""
