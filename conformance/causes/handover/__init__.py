"""What somebody gets who is to mend a cause: the smallest case, what shows it without this project, a draft."""

from .folder import hand_over
from .proof import Proof, prove

__all__ = ["Proof", "hand_over", "prove"]
