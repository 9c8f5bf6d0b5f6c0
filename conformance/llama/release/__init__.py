"""Test a build of llama.cpp on all its devices, compared with another build."""
