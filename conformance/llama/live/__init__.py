"""Live families: runs of llama.cpp, and checks of what backends declare (see `run.live`)."""
