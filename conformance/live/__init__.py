"""Live families: whole runs of llama.cpp, and checks of what a backend declares. Protocol: `run.live`."""
