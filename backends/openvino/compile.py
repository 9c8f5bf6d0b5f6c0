"""Compiling: core, devices, properties, models on disk; importable without openvino."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

from backends.openvino.translating.plan import Plan
from backends.openvino.translating.template import Sym, expr_of
from conformance.ggml.errors import BackendError, UnavailableError, UsageError

ACCURACY = {"EXECUTION_MODE_HINT": "ACCURACY", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}
"""Properties for f32 throughout."""
PROPERTIES: dict[str, dict[str, Any]] = {"accuracy": ACCURACY, "default": {}}
"""Value of the option `precision` -> properties with which a model is compiled."""
MOST_THREADS = 1 << 15
FUSION = ("auto", "on", "off")
UNFUSED = {"SNIPPETS_MODE": "DISABLE"}
"""CPU plugin property: run elementwise ops one by one; some versions may lack it."""
CompiledModel: TypeAlias = Any
"""An `openvino.CompiledModel` or its replacement; openvino ships no type information."""


@dataclass(frozen=True, slots=True)
class Compiler:
    """A device and how to compile for it."""

    ov: ModuleType
    core: Any
    device: str
    properties: dict[str, Any]
    fusion: str = "auto"
    stage: str = "run"
    split: bool = False
    """True if unconnected parts may be compiled in parallel, as two models."""

    def compiled(
        self,
        results: list[Any],
        parameters: list[Any],
        sinks: Sequence[Any] = (),
        *,
        served: bool = True,
        halves: bool = False,
    ) -> CompiledModel:
        """Make a model of nodes and compile it, or interpret it at stage `translate`.

        Results and parameters are in the order of outputs and inputs; sinks assign variables. `served`: the model
        contains weights. In a model without any, which tests ops, fusing kernels would take 40 % of the time; `fusion`
        decides for all models if it is not `auto`. `halves`: the model multiplies by weights of 16-bit floats, which
        the CPU plugin must not convert. BackendError if the device's compiler refuses it.
        """
        from .rewrite import Whole, language_model, separate_parts  # noqa: PLC0415  # needs openvino, which may be absent until now

        halves = halves and self.device == "CPU" and self.stage == "run" and self.accurate

        def more() -> list[Any]:
            return [language_model()] if halves else []

        try:
            if self.split and not sinks and (parts := separate_parts(results, parameters, more)):
                return Whole(parts, lambda model: self.model(model, served=served))
            return self.model(self.ov.Model(results, [*sinks, *more()], parameters), served=served)
        except RuntimeError as e:
            raise BackendError(f"OpenVINO {self.device} refused to compile: {words(e)}") from e

    def model(self, model: Any, *, served: bool = True) -> CompiledModel:  # noqa: ANN401  # an openvino.Model
        """Compile a model, as `compiled` does; a refusal is still OpenVINO's RuntimeError."""
        from .rewrite import Interpreted, mark_float32  # noqa: PLC0415  # needs openvino, which may be absent until now

        if self.stage == "translate":
            return Interpreted(model)
        if not self.accurate:
            served = mark_float32(self.core, model) or served
        fused = served if self.fusion == "auto" else self.fusion == "on"
        extra = {} if fused or self.device != "CPU" else UNFUSED
        try:
            return self.core.compile_model(model, self.device, {**self.properties, **extra})
        except RuntimeError as e:
            if not any(name in str(e) for name in extra):
                raise
            return self.core.compile_model(model, self.device, self.properties)

    @property
    def accurate(self) -> bool:
        """True if it computes in float32 throughout."""
        return self.properties.get("EXECUTION_MODE_HINT") == "ACCURACY"

    def knows_bf16(self) -> bool:
        """Return True if the device computes in BF16.

        OpenVINO 2026.4.1 crashes on some products of BF16 constants if the processor has no AVX-512.
        """
        return self.device != "CPU" or "BF16" in self.core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")

    def products(self) -> str:
        """Return the type that the device rounds operands of products to (`Arithmetic.products`).

        The hint names the float type; 8-bit activations with compressed weights are no more exact than F16.
        """
        if self.accurate:
            return "float32"
        hint = self.core.get_property(self.device, "INFERENCE_PRECISION_HINT")
        return "bf16" if hint.get_type_name() == "bf16" else "f16"

    def versions(self) -> dict[str, str]:
        """Return OpenVINO's and the device plugin's versions."""
        plugins = self.core.get_versions(self.device)
        return {"openvino": self.ov.get_version(), **{f"openvino {k}": v.build_number for k, v in plugins.items()}}

    def description(self) -> str:
        """Return the device's own full name."""
        return str(self.core.get_property(self.device, "FULL_DEVICE_NAME"))


def openvino_core(whose: str = "") -> tuple[ModuleType, Any]:
    """Return the package `openvino` and a core of this process; UnavailableError if missing.

    A backend that sets properties on the core names itself, and gets its own core.
    """
    try:
        import openvino  # noqa: PLC0415  # its absence must be an answer, not an import error
    except ImportError as e:
        raise UnavailableError(f"openvino cannot be imported ({e}); install it with: pip install openvino") from e
    return openvino, _core(openvino, whose)


@cache
def _core(openvino: ModuleType, _whose: str) -> Any:  # noqa: ANN401  # openvino ships no type information
    """Return a core that lives until the process ends.

    Its CPU plugin sets a signal stack, and on exit restores the previous one. Two cores that end in creation order
    leave one that is unmapped, and the next signal, such as Ctrl-C, kills the process (OpenVINO 2026.4.1).
    """
    return openvino.Core()


def compiler(device: str, precision: str, fusion: str, stage: str = "run", threads: str = "") -> Compiler:
    """Return the compiler for `device`; UnavailableError if missing, UsageError for an option."""
    one_of("fusion", fusion, FUSION)
    properties = PROPERTIES[one_of("precision", precision, tuple(PROPERTIES))]
    if threads:
        if not (threads.isascii() and threads.isdecimal() and 0 < int(threads) < MOST_THREADS):
            raise UsageError(f"threads: a number from 1 expected, {threads!r} given")
        properties = {**properties, "INFERENCE_NUM_THREADS": int(threads)}
    openvino, core = openvino_core()
    here = core.available_devices
    # GPU.0 may be requested as GPU
    if device not in here and not any(d.split(".")[0] == device for d in here):
        raise UnavailableError(f"openvino: device {device!r} is not here; devices found: {', '.join(here) or 'none'}")
    split = device == "CPU" and stage == "run" and (os.cpu_count() or 1) > 1
    return Compiler(openvino, core, device, properties, fusion, stage, split)


def one_of(option: str, value: str, legal: Sequence[str]) -> str:
    """Return the value of an option; UsageError if it is not a legal one."""
    if value not in legal:
        raise UsageError(f"{option}: one of {', '.join(legal)} expected, {value!r} given")
    return value


def words(e: BaseException) -> str:
    """Return the useful part of OpenVINO's message, without source locations."""
    lines = [x.strip() for x in str(e).splitlines() if x.strip()]
    useful = [x for x in lines if not x.startswith(("Exception from", "While validating"))] or lines
    return " ".join(useful)[:400] or type(e).__name__


def executed(compiled: CompiledModel) -> Iterator[tuple[str, Any]]:
    """Yield each executed layer's type in the device's runtime model, and its node."""
    for node in compiled.get_runtime_model().get_ordered_ops():
        info = node.get_rt_info()
        yield info["layerType"].astype(str) if "layerType" in info else node.get_type_name(), node


# -- compiled models on disk, for the next process ---------------------------------------------------------------------
SIZE = 32
"""Bytes of a digest."""


class ModelCache:
    """A folder of compiled models named by all their dependencies; created on the first write.

    OpenVINO's own CACHE_DIR (2026.4.1) names a model by, among others, the names of its nodes, which depend on the
    process's earlier models. Here a file begins with a digest of its name and its bytes: a broken or unrelated file is
    compiled again and replaced.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def name(self, plan: Plan, options: object) -> str:
        """Return a model's name from its plan, weights, symbols, options and this translation."""
        h = hashlib.blake2b(_sources(), digest_size=SIZE)
        h.update(repr((plan.key, options)).encode())
        for t in plan.tensors:
            for n in (*t.ne, *t.nb, t.view_offs):
                h.update(str(expr_of(n) if isinstance(n, Sym) else n).encode() + b" ")
        return h.hexdigest()

    def compiled(self, compiler: Compiler, name: str, compile_: Callable[[], Any]) -> tuple[CompiledModel, str]:
        """Return the model `name` from its file or `compile_`, and a note for the witness."""
        path = self._folder / f"{name}.model"
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            data = b""
        note = "models compiled and kept in cache_dir"
        if data and data[:SIZE] != _digest(name, data[SIZE:]):
            note = "models in cache_dir broken or of another origin, compiled again"
        elif data:
            try:
                model = compiler.core.import_model(data[SIZE:], compiler.device, compiler.properties)
            except RuntimeError:
                note = "models in cache_dir that OpenVINO refused, compiled again"
            else:
                return model, "models loaded from cache_dir"
        model = compile_()
        stream = io.BytesIO()
        model.export_model(stream)
        self._write(path, name, stream.getvalue())
        return model, note

    def _write(self, path: Path, name: str, blob: bytes) -> None:
        """Write a file atomically, even with concurrent writers."""
        self._folder.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_bytes(_digest(name, blob) + blob)
        part.replace(path)


def _digest(name: str, blob: bytes) -> bytes:
    h = hashlib.blake2b(name.encode(), digest_size=SIZE)
    h.update(blob)
    return h.digest()


@cache
def _sources() -> bytes:
    """Return a digest of this package: other versions emit other models for equal plans."""
    h = hashlib.blake2b(digest_size=SIZE)
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        h.update(path.read_bytes())
    return h.digest()
