"""Folder of `launch.py` only: Python puts it first on `sys.path` when running that file."""
