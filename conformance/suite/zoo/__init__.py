"""The zoo: graphs of every architecture that llama.cpp knows, recorded from llama.cpp itself with made-up weights."""
