"""ctypes binding of ggml and llama.cpp: finds, loads and checks a library before use."""
