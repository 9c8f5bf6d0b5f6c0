"""Way `train`: `ggml_opt_fit` learns a linear map in several sessions, as a finetune does.

The map must come closer, and a session must leave no memory behind.
"""

from __future__ import annotations

import ctypes
from contextlib import ExitStack
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from conformance.ggml.lib.layout import InitParams
from conformance.ggml.lib.library import Library
from conformance.llama.live.ways import Mismatch, bound

TRAIN = "train"
WAYS = (TRAIN,)
INPUTS, OUTPUTS, POINTS, BATCH = 8, 4, 64, 16
EPOCHS = 8
SESSIONS, SETTLED = 24, 8
"""Sessions, and those after which the process needs no more memory."""
KEPT = 64 << 10
"""Maximum bytes that a session may keep; one that forgets its graph keeps 900 kB."""
NODES = 2048
"""`GGML_DEFAULT_GRAPH_SIZE`, the nodes of each graph of `ggml_opt_init`."""
MEAN_SQUARED_ERROR, ADAMW = 3, 0
"""Values of `ggml_opt_loss_type` and `ggml_opt_optimizer_type`."""

F32 = NDArray[np.float32]
_P, _I, _I64 = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64


class Trainer:
    """A linear map on the CPU, whose weights are parameters, and points to learn."""

    def __init__(self, library: Library, seed: int, owned: ExitStack) -> None:
        """Allocate both; UnavailableError if the library does not export the functions."""
        self._library, self._g = library, library.ggml
        bound(library, "ggml_opt_context_optimizer_type", _I, _P)  # since then, `ggml_opt_fit` takes the optimizer
        kinds = _P, _P, _P, _P, _P, _I, _I, _P, _I64, _I64, ctypes.c_float, ctypes.c_bool
        self._fit = bound(library, "ggml_opt_fit", None, *kinds)
        self._mul_mat = bound(library, "ggml_mul_mat", _P, _P, _P, _P)
        settings: Any = bound(library, "ggml_opt_get_default_optimizer_params", _P)
        self._settings = ctypes.cast(settings, _P)
        f32, random = library.types["f32"], np.random.default_rng(seed)
        context = self._g.init(InitParams(4 * library.layout.overhead, None, True))
        owned.callback(self._g.free, context)
        self._weights = self._g.new_tensor_4d(context, f32, INPUTS, OUTPUTS, 1, 1)
        self._inputs = self._g.new_tensor_4d(context, f32, INPUTS, BATCH, 1, 1)
        bound(library, "ggml_set_param", None, _P)(self._weights)
        self._g.set_input(self._inputs)
        cpu = library.devices.by_name("CPU")
        buffer = self._g.backend_alloc_ctx_tensors_from_buft(context, cpu.buffer_type)
        owned.callback(self._g.backend_buffer_free, buffer)
        library.set(self._weights, np.zeros(4 * INPUTS * OUTPUTS, np.uint8))
        backend = cpu.start(1)
        owned.callback(self._g.backend_free, backend)
        self._sched = self._g.backend_sched_new((_P * 1)(backend), None, 1, NODES, False, False)
        owned.callback(self._g.backend_sched_free, self._sched)
        init = bound(library, "ggml_opt_dataset_init", _P, _I, _I, *(_I64,) * 4)
        self._points = init(f32, f32, INPUTS, OUTPUTS, POINTS, 1)
        owned.callback(bound(library, "ggml_opt_dataset_free", None, _P), self._points)
        self.truth = random.standard_normal((OUTPUTS, INPUTS)).astype(np.float32) / 8
        data = random.standard_normal((POINTS, INPUTS)).astype(np.float32)
        for name, values in (("data", data), ("labels", data @ self.truth.T)):
            library.set(bound(library, f"ggml_opt_dataset_{name}", _P, _P)(self._points), _bytes(values))

    def learn(self) -> None:
        """Run a session of `EPOCHS`."""
        size = NODES * self._library.layout.overhead + 3 * self._g.graph_overhead_custom(NODES, True)
        context = self._g.init(InitParams(size, None, True))
        try:
            outputs = self._mul_mat(context, self._weights, self._inputs)
            self._fit(
                self._sched, context, self._inputs, outputs, self._points, MEAN_SQUARED_ERROR, ADAMW, self._settings,
                EPOCHS, BATCH, 0.0, True,
            )  # fmt: skip
        finally:
            self._g.free(context)

    def error(self) -> float:
        """Return the mean squared difference between the weights and those of the points."""
        found = self._library.get(self._weights, 4 * INPUTS * OUTPUTS).view(np.float32)
        return float(np.square(found.reshape(OUTPUTS, INPUTS) - self.truth).mean())


def _bytes(values: Any) -> NDArray[np.uint8]:  # noqa: ANN401  # an array of float32
    return np.ascontiguousarray(values, np.float32).view(np.uint8).reshape(-1)


def play(library: Library, _way: str, seed: int) -> None:
    """Learn in sessions; Mismatch if the error stays over a tenth, or sessions keep memory."""
    process = psutil.Process()
    with ExitStack() as owned:
        trainer = Trainer(library, seed, owned)
        first, before = trainer.error(), 0
        for session in range(SESSIONS):
            if session == SETTLED:
                before = process.memory_info().vms
            trainer.learn()
        kept = (process.memory_info().vms - before) / (SESSIONS - SETTLED)
        last = trainer.error()
    if not last < first / 10:
        raise Mismatch(f"the mean squared error of the weights fell from {first:.3g} to {last:.3g}, not to a tenth")
    if kept > KEPT:
        raise Mismatch(f"a session of ggml_opt_fit keeps {kept:,.0f} bytes, at most {KEPT:,} expected")
