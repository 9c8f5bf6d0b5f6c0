"""The folder of `launch.py`, which is run as a file: nothing else may lie here, for Python looks here first."""
