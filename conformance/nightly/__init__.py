"""The nightly: everything there is to run, in parts, each in a process of its own; it survives failures and kills."""
