"""Tools that run llama.cpp: live families, recordings, model checks, build comparisons."""
