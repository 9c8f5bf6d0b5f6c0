"""`python -m backends.ggml [DIR_OR_FILE]`: devices of a ggml library, their buffer types."""

from __future__ import annotations

import sys

from conformance.ggml.lib.library import Library


def main() -> None:
    """Print a line per device of the library named by the first argument, or of the wheel's."""
    library = Library(sys.argv[1] if len(sys.argv) > 1 else "")
    library.devices.load_all()
    sys.stdout.write(f"{library.title}\n")
    for name, device in library.devices.registered().items():
        kinds = ", ".join(device.buffer_types())
        sys.stdout.write(f"  {name} ({device.type}): {device.description}; buffer types: {kinds}\n")


if __name__ == "__main__":
    main()
