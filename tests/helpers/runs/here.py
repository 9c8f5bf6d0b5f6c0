"""A runner for adapters that a test changes in its own process."""

from __future__ import annotations

from conformance.backend.interface import Backend
from conformance.backend.registry import Spec, create
from conformance.run.runner import Runner


class Here(Runner):
    """Opens every backend in this process."""

    def open(self, spec: Spec, *, own: bool) -> Backend:
        """The backend itself."""
        del own
        return create(spec)
