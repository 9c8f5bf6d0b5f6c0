"""The real ggml, of any version, by ctypes: `ggml?lib=DIR_OR_FILE&device=NAME&buffer=NAME&threads=N`."""

from .adapter import GgmlBackend

__all__ = ["GgmlBackend"]
