"""`python -m conformance.cli`: the `conform` of this very Python, wherever its script lies."""

from conformance.cli import main
from conformance.process.launcher.launch import spare_collections


def conform() -> None:
    """The command line, in a process of its own."""
    spare_collections()
    main(prog_name="conform")


if __name__ == "__main__":
    conform()
