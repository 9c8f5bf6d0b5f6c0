"""How fast a backend is, beside whether it is right."""
