"""A build of llama.cpp that somebody ships, tested whole, and against the build before."""
