"""Every op of ggml: what its constructors make and assert."""

from . import params as params  # its declarations make `Tensor.params` work
