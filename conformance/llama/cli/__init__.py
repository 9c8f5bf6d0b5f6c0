"""Commands of the tools that run llama.cpp."""
