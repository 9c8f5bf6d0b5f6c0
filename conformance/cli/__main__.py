"""`python -m conformance.cli` runs `conform` with this Python, even if not on PATH."""

from conformance.cli import main
from conformance.process.launcher.launch import spare_collections


def conform() -> None:
    """Run the command line in its own process."""
    spare_collections()
    main(prog_name="conform")


if __name__ == "__main__":
    conform()
