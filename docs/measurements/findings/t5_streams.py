"""Make a context for one and for two sequences of a model.

    python t5_streams.py LIBRARY MODEL.gguf

LIBRARY is a libllama.so, or an extension that exports its symbols; x86-64 Linux.
"""

from __future__ import annotations

import ctypes
import struct
import sys

N_SEQ_MAX = 12
"""Offset in `llama_context_params`; `kv_unified` stays false, its default."""


class Struct(ctypes.Structure):
    """Parameters, passed on the stack: more bytes than it has are no harm."""

    _fields_ = (("bytes", ctypes.c_ubyte * 1024),)


def main(path: str, model: str) -> None:
    """Print whether llama.cpp makes each context."""
    llama = ctypes.CDLL(path, ctypes.RTLD_GLOBAL)
    for name in ("model_default_params", "context_default_params"):
        getattr(llama, f"llama_{name}").restype = Struct
    for name in ("model_load_from_file", "init_from_model"):
        getattr(llama, f"llama_{name}").restype = ctypes.c_void_p
    llama.llama_backend_init()
    loaded = ctypes.c_void_p(llama.llama_model_load_from_file(model.encode(), llama.llama_model_default_params()))
    for sequences in (1, 2):
        params = llama.llama_context_default_params()
        struct.pack_into("<I", params.bytes, N_SEQ_MAX, sequences)
        print(f"{sequences} sequences:", flush=True)
        print("made:", bool(llama.llama_init_from_model(loaded, params)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
