"""A projector loaded by libmtmd, and its calls: images and sounds in, embeddings out."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from conformance.case.streams import Stream
from conformance.ggml.errors import UsageError
from conformance.ggml.lib.llama import put
from conformance.ggml.lib.mtmd import CHUNK_TEXT, InputText, Mtmd
from conformance.llama.zoo.load import LacksError, RefusedError, from_metadata

from .table import Modality

F32 = NDArray[np.float32]
Medium = Literal["whole", "odd", "large", "thin"]
SAMPLES: dict[Medium, int] = {"whole": 16_000, "odd": 12_347, "large": 31 * 16_000 + 77, "thin": 403}
"""Samples of each sound: 1 s, no multiple of a hop, over 30 s, one FFT window."""
_SAID, _UNKNOWN = re.compile(r"rror|ailed"), re.compile(r"(unknown|unexpected) .*projector type")
TOO_MANY, OTHER_SHAPE = 2, 3
"""`mtmd_batch_add_chunk` returns one of these if the chunk does not fit the batch."""


class UnknownError(UsageError):
    """A projector that this libmtmd does not know."""


@dataclass(frozen=True, slots=True)
class Load:
    """The fields of a worker's `load` request."""

    projector: str
    modality: Modality
    file: str
    text: str
    """File with the metadata of the text model."""
    tile: int
    stream: str
    lib: str = ""
    architecture: str = "llama"
    """Architecture of the text model."""


def image_size(medium: Medium, tile: int) -> tuple[int, int]:
    """Return width and height in pixels: one tile, odd sides, several tiles, a strip."""
    sizes = {
        "whole": (tile, tile), "odd": (tile + 13, tile - 9), "large": (3 * tile + 5, 2 * tile + 3),
        "thin": (5 * tile, 7),
    }  # fmt: skip
    return sizes[medium]


@dataclass
class Encoder:
    """A projector on a device, and contexts of it."""

    library: Mtmd
    load: Load
    device: str
    """`ggml_backend_dev_name` of the device; "" for the CPU alone."""
    contexts: list[int] = field(default_factory=list)
    """`mtmd_context *` of every context; freed by `clean`."""
    _chunks: list[int] = field(default_factory=list)
    _bitmaps: list[int] = field(default_factory=list)

    def call(self, name: str) -> Callable[..., Any]:
        """Return `mtmd_NAME`; LacksError if this library does not export it."""
        function: Callable[..., Any] | None = getattr(self.library.mtmd, name)
        if function is None:
            raise LacksError(f"mtmd_{name}", "libmtmd")
        return function

    @contextmanager
    def clean(self) -> Iterator[None]:
        """Free everything that was created inside the block."""
        try:
            yield
        finally:
            for made, free in (
                (self._chunks, "input_chunks_free"), (self._bitmaps, "bitmap_free"), (self.contexts, "free"),
            ):  # fmt: skip
                while made:
                    self.call(free)(made.pop())

    @cached_property
    def text_model(self) -> int:
        """A `llama_model *` that gives the embedding width and tokenises text; it computes nothing."""
        params = self.library.llama.model_default_params()
        put(params, n_gpu_layers=0)
        model = from_metadata(self.library, self.load.text, lambda *_: None, params)
        if not model:
            raise UsageError(
                f"llama.cpp cannot create the text model {self.load.architecture}: {self.library.reason()}"
            )
        return model

    @cached_property
    def n_embd(self) -> int:
        """Elements of the text model's input row, including the part for deeper layers."""
        llama = self.library.llama
        return int((llama.model_n_embd_inp or llama.model_n_embd)(self.text_model))

    def context(self, *, flash_attn: bool = True, n_threads: int = 1, callback: Any = None) -> int:  # noqa: ANN401
        """Make an `mtmd_context *`. The caller keeps `callback`, an `EVAL_CALLBACK`, alive.

        Raises:
            UnknownError: this libmtmd has no such projector.
            LacksError: this libmtmd lacks a function.
            UsageError: there is no such device, or the file cannot be loaded.
        """
        params = self.call("context_params_default")()
        handle = self.library.devices.by_name(self.device).handle if self.device else None
        more = {"use_gpu": bool(self.device), "flash_attn_type": int(flash_attn), "n_threads": n_threads}
        if put(params, device=handle) and self.device:
            os.environ["MTMD_BACKEND_DEVICE"] = self.device
        put(params, warmup=0, print_timings=0, **more)
        if callback is not None and put(params, cb_eval=ctypes.cast(callback, ctypes.c_void_p)):
            raise LacksError("mtmd_context_params.cb_eval", "libmtmd")
        context = self.call("init_from_file")(os.fsencode(self.load.file), self.text_model, params)
        if not context:
            said = " / ".join(line for line in self.library.log.lines if _SAID.search(line)) or self.library.reason()
            if _UNKNOWN.search(said):
                raise UnknownError(f"this libmtmd knows no projector {self.load.projector}")
            raise UsageError(f"libmtmd cannot load the projector: {said}")
        self.contexts.append(int(context))
        return int(context)

    def medium(self, name: Medium, version: str = "") -> int:
        """Make an image or a sound (`mtmd_bitmap *`), with the same bytes for each name and version."""
        stream = Stream(self.load.stream, f"{name} {version}")
        if self.load.modality == "audio":
            samples = _sound(stream, SAMPLES[name])
            made = self.call("bitmap_init_from_audio")(samples.size, samples.ctypes.data)
        else:
            pixels = _picture(stream, *image_size(name, self.load.tile))
            made = self.call("bitmap_init")(pixels.shape[1], pixels.shape[0], pixels.ctypes.data)
        self._bitmaps.append(int(made))
        return int(made)

    def mergeable(self, *bitmaps: int) -> None:
        """Mark bitmaps as frames of a video, as older versions do for images of one size."""
        for bitmap in bitmaps if self.library.mtmd.bitmap_set_mergeable else ():
            self.call("bitmap_set_mergeable")(bitmap, True)  # C's signature

    def chunks(self, context: int, *media: int, between: str = " and ") -> list[int]:
        """Tokenise a prompt with these media and return every `mtmd_input_chunk *` that is not text.

        UsageError if libmtmd fails.
        """
        marker = self.call("default_marker")().decode()
        text = between.join([marker] * len(media)).encode()
        chunks = self.call("input_chunks_init")()
        self._chunks.append(int(chunks))
        array = (ctypes.c_void_p * len(media))(*media)
        ask = InputText(text, len(text), False, False)  # C's own order
        status = self.call("tokenize")(context, chunks, ctypes.byref(ask), array, len(media))
        if status:
            raise UsageError(f"mtmd_tokenize returned {status}: {self.library.reason()}")
        get, kind = self.call("input_chunks_get"), self.call("input_chunk_get_type")
        found = [get(chunks, i) for i in range(self.call("input_chunks_size")(chunks))]
        return [int(chunk) for chunk in found if kind(chunk) != CHUNK_TEXT]

    def encode(self, context: int, chunk: int) -> F32:
        """Return the embeddings of a chunk, `[tokens, n_embd]`; UsageError if libmtmd fails."""
        status = self.call("encode_chunk")(context, chunk)
        if status:
            raise UsageError(f"mtmd_encode_chunk returned {status}: {self.library.reason()}")
        return self._rows(self.call("get_output_embd")(context), chunk)

    def look(self, context: int, *media: int) -> list[F32]:
        """Return the embeddings of each chunk of a prompt."""
        return [self.encode(context, chunk) for chunk in self.chunks(context, *media)]

    def batch(self, context: int, chunks: Sequence[int]) -> list[F32]:
        """Return the embeddings of chunks encoded as one batch, in order.

        RefusedError if libmtmd declines the batch, as it may.
        """
        batch = self.call("batch_init")(context)
        try:
            for chunk in chunks:
                status = self.call("batch_add_chunk")(batch, chunk)
                if status in (TOO_MANY, OTHER_SHAPE):
                    raise RefusedError(f"mtmd_batch_add_chunk returned {status}")
                if status:
                    raise UsageError(f"mtmd_batch_add_chunk returned {status}: {self.library.reason()}")
            status = self.call("batch_encode")(batch)
            if status:
                raise UsageError(f"mtmd_batch_encode returned {status}: {self.library.reason()}")
            return [self._rows(self.call("batch_get_output_embd")(batch, chunk), chunk) for chunk in chunks]
        finally:
            self.call("batch_free")(batch)

    def _rows(self, pointer: int | None, chunk: int) -> F32:
        n = int(self.call("input_chunk_get_n_tokens")(chunk))
        if not pointer:
            raise UsageError(f"libmtmd gives no embeddings of {n} tokens: {self.library.reason()}")
        return np.frombuffer(ctypes.string_at(pointer, 4 * n * self.n_embd), np.float32).reshape(n, self.n_embd)


def _picture(stream: Stream, width: int, height: int) -> NDArray[np.uint8]:
    """Draw slanted stripes with noise, `[height, width, 3]`: smooth, all patches different."""
    x, y = np.meshgrid(np.arange(width), np.arange(height))
    slopes = stream.bytes(6).astype(np.int64) % 7 + 1
    stripes = np.stack([x * slopes[2 * c] + y * slopes[2 * c + 1] for c in range(3)], axis=-1)
    noise = stream.bytes(width * height * 3).reshape(height, width, 3).astype(np.int64) % 96
    return np.ascontiguousarray(((stripes + noise) % 256).astype(np.uint8))


def _sound(stream: Stream, n: int) -> F32:
    """Make `n` samples in [-1, 1]: a sawtooth of rising pitch, with noise."""
    at = np.arange(n, dtype=np.int64)
    saw = (at * (37 + at // 4096)) % 512
    return (saw.astype(np.float32) / np.float32(512) + stream.unit(n) - np.float32(1)) * np.float32(0.9)
