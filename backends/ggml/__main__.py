"""`python -m backends.ggml [DIR_OR_FILE]`: the devices of a ggml library, and their kinds of memory."""

from __future__ import annotations

import sys

from .devices import survey
from .library import Library


def main() -> None:
    """Print one line per device of the library that the first argument names, or of the wheel's."""
    library = Library(sys.argv[1] if len(sys.argv) > 1 else "")
    sys.stdout.write(f"{library.title}\n")
    for offered in survey(library):
        kinds = ", ".join(offered.buffer_types)
        sys.stdout.write(f"  {offered.name} ({offered.kind}): {offered.description}; buffer types: {kinds}\n")


if __name__ == "__main__":
    main()
