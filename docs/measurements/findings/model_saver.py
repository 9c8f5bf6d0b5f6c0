"""Load a model, write it with `llama_model_save_to_file`, and decode four tokens with what was written.

    python model_saver.py LIBRARY MODEL.gguf WRITTEN.gguf

LIBRARY is a libllama.so, or an extension that exports its symbols, such as xllamacpp.abi3.so; x86-64 Linux.
"""

from __future__ import annotations

import ctypes
import sys


class Struct(ctypes.Structure):
    """Parameters or a batch, passed on the stack: more bytes than it has are no harm."""

    _fields_ = (("bytes", ctypes.c_char * 1024),)


def main(path: str, model: str, written: str) -> None:
    """Write the model, load it again and decode; exit code 1 if it is refused."""
    llama = ctypes.CDLL(path, ctypes.RTLD_GLOBAL)
    for name in ("model_default_params", "context_default_params", "batch_get_one"):
        getattr(llama, f"llama_{name}").restype = Struct
    for name in ("model_load_from_file", "init_from_model"):
        getattr(llama, f"llama_{name}").restype = ctypes.c_void_p
    llama.llama_model_load_from_file.argtypes = ctypes.c_char_p, Struct
    llama.llama_model_save_to_file.argtypes = ctypes.c_void_p, ctypes.c_char_p
    llama.llama_init_from_model.argtypes = ctypes.c_void_p, Struct
    llama.llama_decode.argtypes = ctypes.c_void_p, Struct
    llama.llama_backend_init()
    first = llama.llama_model_load_from_file(model.encode(), llama.llama_model_default_params())
    print("the model decodes:", decodes(llama, first), flush=True)
    llama.llama_model_save_to_file(first, written.encode())
    again = llama.llama_model_load_from_file(written.encode(), llama.llama_model_default_params())
    print("what was written loads:", bool(again), flush=True)
    if not again:
        sys.exit(1)
    print("what was written decodes:", decodes(llama, again), flush=True)


def decodes(llama: ctypes.CDLL, model: int) -> bool:
    """Return True if `llama_decode` of four tokens returns 0."""
    context = llama.llama_init_from_model(model, llama.llama_context_default_params())
    tokens = (ctypes.c_int32 * 4)(1, 2, 3, 4)
    return bool(context) and llama.llama_decode(context, llama.llama_batch_get_one(tokens, 4)) == 0


if __name__ == "__main__":
    main(*sys.argv[1:])
