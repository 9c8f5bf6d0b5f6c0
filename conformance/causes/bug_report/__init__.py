"""A bug report for each cause: the smallest case, what shows it without this project, the draft of an issue."""

from .compiled import Ended, prove
from .folder import write_report

__all__ = ["Ended", "prove", "write_report"]
