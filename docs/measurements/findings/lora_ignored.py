"""Say whether an adapter of one weight changes the logits that a model decodes.

    python lora_ignored.py LIBRARY MODEL.gguf WEIGHT ADAPTER.gguf

ADAPTER.gguf is written. LIBRARY is a libllama.so, or an extension that exports its symbols; x86-64 Linux.
"""

from __future__ import annotations

import ctypes
import sys

import numpy as np
from gguf import GGUFReader, GGUFWriter


class Struct(ctypes.Structure):
    """Parameters or a batch, passed on the stack: more bytes than it has are no harm."""

    _fields_ = (("bytes", ctypes.c_char * 1024),)


def main(path: str, model: str, weight: str, adapter: str) -> None:
    """Write an adapter of rank 1 with large factors; print whether it changes the logits."""
    reader = GGUFReader(model)
    rows, columns = (int(n) for n in next(t for t in reader.tensors if t.name == weight).shape)
    writer = GGUFWriter(adapter, reader.fields["general.architecture"].contents())
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 1.0)
    flipped = weight == "token_embd.weight"
    for end, shape in zip("ab", [(columns, 1), (rows, 1)] if flipped else [(1, rows), (columns, 1)], strict=True):
        writer.add_tensor(f"{weight}.lora_{end}", np.ones(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    llama = ctypes.CDLL(path, ctypes.RTLD_GLOBAL)
    for name in ("model_default_params", "context_default_params", "batch_get_one"):
        getattr(llama, f"llama_{name}").restype = Struct
    for name in ("model_load_from_file", "init_from_model", "adapter_lora_init", "model_get_vocab"):
        getattr(llama, f"llama_{name}").restype = ctypes.c_void_p
    llama.llama_get_logits.restype = ctypes.POINTER(ctypes.c_float)
    llama.llama_backend_init()
    loaded = ctypes.c_void_p(llama.llama_model_load_from_file(model.encode(), llama.llama_model_default_params()))
    lora = ctypes.c_void_p(llama.llama_adapter_lora_init(loaded, adapter.encode()))
    found = []
    for adapters in ([], [lora]):
        context = ctypes.c_void_p(llama.llama_init_from_model(loaded, llama.llama_context_default_params()))
        n, scales = len(adapters), (ctypes.c_float * 1)(1.0)
        llama.llama_set_adapters_lora(context, (ctypes.c_void_p * 1)(*adapters), ctypes.c_size_t(n), scales)
        tokens = (ctypes.c_int32 * 4)(1, 2, 3, 4)
        llama.llama_decode(context, llama.llama_batch_get_one(tokens, 4))
        n_vocab = llama.llama_vocab_n_tokens(ctypes.c_void_p(llama.llama_model_get_vocab(loaded)))
        found.append(np.ctypeslib.as_array(llama.llama_get_logits(context), (n_vocab,)).copy())
    print(f"{weight}: adapter accepted: {bool(lora)}; logits the same: {np.array_equal(*found)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
