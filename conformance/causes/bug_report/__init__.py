"""Bug reports: the smallest case, a standalone proof and the draft of an issue per cause."""

from .compiled import Ended, prove
from .folder import write_report

__all__ = ["Ended", "prove", "write_report"]
