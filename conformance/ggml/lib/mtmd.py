"""libmtmd, llama.cpp's library for images and audio; a build may lack any of its functions."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import ClassVar

from conformance.ggml.errors import UnavailableError

from .layout import LOG_CALLBACK, CType, Signatures, history
from .llama import Llama, choose

_P, _S, _B = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_bool
_I, _U, _Z = ctypes.c_int, ctypes.c_uint32, ctypes.c_size_t

MTMD_PARAMS = history(
    "mtmd_context_params",
    "use_gpu device print_timings n_threads image_marker media_marker flash_attn_type warmup image_min_tokens "
    "image_max_tokens cb_eval cb_eval_user_data batch_max_tokens progress_callback progress_callback_user_data",
    ("device ", ""),
    (" progress_callback progress_callback_user_data", ""),  # b9750
    (" batch_max_tokens", ""),
    (" cb_eval cb_eval_user_data", ""),
)
"""`struct mtmd_context_params`, newest first."""


class InputText(ctypes.Structure):
    """`struct mtmd_input_text`; before 2026 the two bools took the place of `text_len`."""

    _fields_ = (("text", _S), ("text_len", _Z), ("add_special", _B), ("parse_special", _B))


CHUNK_TEXT = 0
"""`MTMD_INPUT_CHUNK_TYPE_TEXT`."""

# fmt: off
MTMD: Signatures = {
    "default_marker": (_S, ()), "log_set": (None, (LOG_CALLBACK, _P)), "free": (None, (_P,)),
    "bitmap_init": (_P, (_U, _U, _P)), "bitmap_init_from_audio": (_P, (_Z, _P)), "bitmap_free": (None, (_P,)),
    "bitmap_set_mergeable": (None, (_P, _B)),
    "input_chunks_init": (_P, ()), "input_chunks_size": (_Z, (_P,)), "input_chunks_get": (_P, (_P, _Z)),
    "input_chunks_free": (None, (_P,)),
    "input_chunk_get_type": (_I, (_P,)), "input_chunk_get_n_tokens": (_Z, (_P,)),
    "tokenize": (_I, (_P, _P, ctypes.POINTER(InputText), _P, _Z)),
    "encode_chunk": (_I, (_P, _P)), "get_output_embd": (_P, (_P,)),
    "batch_init": (_P, (_P,)), "batch_free": (None, (_P,)), "batch_add_chunk": (_I, (_P, _P)),
    "batch_encode": (_I, (_P,)), "batch_get_output_embd": (_P, (_P, _P)),
    "get_audio_sample_rate": (_I, (_P,)), "get_audio_bitrate": (_I, (_P,)),
}
"""`mtmd_*`."""
# fmt: on


class Mtmd(Llama):
    """A loaded llama.cpp with libmtmd; `mtmd.encode_chunk` is None if the build lacks it.

    UnavailableError as for `Llama`.
    """

    optional: ClassVar = ("mtmd",)

    def __init__(self, where: str = "") -> None:
        super().__init__(where)
        self.mtmd = SimpleNamespace()
        self.absent = ""
        """Why libmtmd cannot be used: the build has none, or its parameters fit no known layout."""
        self._bind(self.mtmd, "mtmd_", {**MTMD, **_made(MTMD_PARAMS[0])})
        if self.mtmd.context_params_default is None or self.mtmd.init_from_file is None:
            self.absent = f"{self.title} carries no libmtmd: it exports no mtmd_init_from_file"
            return
        try:
            params = choose("mtmd_context_params", self.mtmd.context_params_default, MTMD_PARAMS, self.title)
        except UnavailableError as e:
            self.absent = str(e)
            return
        self._bind(self.mtmd, "mtmd_", _made(params))
        if self.mtmd.log_set is not None:
            self.mtmd.log_set(self.log.callback, None)


def _made(params: CType) -> Signatures:
    """Return the functions that take or return parameters, for one layout."""
    return {"context_params_default": (params, ()), "init_from_file": (_P, (_S, _P, params))}
