"""Makes `pytest conformance` the suite; all of it is in `conformance.plugin`."""

from conformance.plugin import *  # noqa: F403  # pytest looks for hooks by name here
