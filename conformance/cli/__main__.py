"""`python -m conformance.cli`: the `conform` of this very Python, wherever its script lies."""

from . import main

main(prog_name="conform")
