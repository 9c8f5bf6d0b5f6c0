"""A night of runs: parts of a TOML file, each a `conform` command in a process of its own."""
