"""`python -m conformance.cli`: the `conform` of this very Python, wherever its script lies."""

from conformance.cli import main

main(prog_name="conform")
