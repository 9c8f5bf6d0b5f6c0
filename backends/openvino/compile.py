"""Compiling: the core, its devices and properties, and compiled models on disk. Imports without openvino."""

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

from conformance.backend.translating.plan import Plan
from conformance.backend.translating.sym import Sym, expr_of
from conformance.ggml.errors import BackendError, UnavailableError, UsageError

ACCURACY = {"EXECUTION_MODE_HINT": "ACCURACY", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}
"""f32 throughout."""
PROPERTIES: dict[str, dict[str, Any]] = {"accuracy": ACCURACY, "default": {}}
"""Value of the option `precision` -> what a model is compiled with."""
MOST_THREADS = 1 << 15
FUSION = ("auto", "on", "off")
UNFUSED = {"SNIPPETS_MODE": "DISABLE"}
"""Makes the CPU plugin run elementwise ops one by one; a property of its own that another version may not know."""
CompiledModel: TypeAlias = Any
"""An `openvino.CompiledModel`, or what stands in its place; openvino ships no type information."""


@dataclass(frozen=True, slots=True)
class Compiler:
    """A device and how to compile for it."""

    ov: ModuleType
    core: Any
    device: str
    properties: dict[str, Any]
    fusion: str = "auto"
    stage: str = "run"
    apart: bool = False
    """Whether what hangs together by nothing may be compiled at the same time, as two models."""

    def compiled(
        self,
        results: list[Any],
        parameters: list[Any],
        sinks: Sequence[Any] = (),
        *,
        served: bool = True,
        halves: bool = False,
    ) -> CompiledModel:
        """Make a model of nodes and compile it, or at stage `translate` have it interpreted.

        Results and parameters stand in the order of outputs and inputs; sinks assign variables. `served`: the model has
        its weights. Fusing kernels for one that only tests ops would take 40 % of the time; `fusion` decides for all if
        it is not `auto`. `halves`: it multiplies with weights of 16-bit floats, which the CPU plugin is to keep as they
        are. BackendError if the device's compiler refuses it.
        """
        from .rewrite import Whole, apart, language_model  # noqa: PLC0415  # needs openvino, which may be absent until now

        halves = halves and self.device == "CPU" and self.stage == "run" and self.accurate

        def more() -> list[Any]:
            return [language_model()] if halves else []

        try:
            if self.apart and not sinks and (parts := apart(results, parameters, more)):
                return Whole(parts, lambda model: self.model(model, served=served))
            return self.model(self.ov.Model(results, [*sinks, *more()], parameters), served=served)
        except RuntimeError as e:
            raise BackendError(f"OpenVINO {self.device} refused to compile: {words(e)}") from e

    def model(self, model: Any, *, served: bool = True) -> CompiledModel:  # noqa: ANN401  # an openvino.Model
        """Compile a model, as `compiled` does; a refusal is still OpenVINO's RuntimeError."""
        from .rewrite import Interpreted, keep  # noqa: PLC0415  # needs openvino, which may be absent until now

        if self.stage == "translate":
            return Interpreted(model)
        if not self.accurate:
            served = keep(self.core, model) or served
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
        """Whether it computes in float32 throughout."""
        return self.properties.get("EXECUTION_MODE_HINT") == "ACCURACY"

    def knows_bf16(self) -> bool:
        """Whether the device computes in BF16: OpenVINO 2026.4.1 dies as it compiles some products of constants of it
        where the processor has no AVX-512.
        """
        return self.device != "CPU" or "BF16" in self.core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")

    def products(self) -> str:
        """What the device rounds the operands of matrix products to, as `Arithmetic.products` names it.

        Its hint says which float; 8-bit activations beside compressed weights are no nearer than F16.
        """
        if self.accurate:
            return "float32"
        hint = self.core.get_property(self.device, "INFERENCE_PRECISION_HINT")
        return "bf16" if hint.get_type_name() == "bf16" else "f16"

    def versions(self) -> dict[str, str]:
        """OpenVINO's and the device plugin's."""
        plugins = self.core.get_versions(self.device)
        return {"openvino": self.ov.get_version(), **{f"openvino {k}": v.build_number for k, v in plugins.items()}}

    def description(self) -> str:
        """The device's own full name."""
        return str(self.core.get_property(self.device, "FULL_DEVICE_NAME"))


def openvino_core(whose: str = "") -> tuple[ModuleType, Any]:
    """The package `openvino` and a core of this process; UnavailableError, which says how to get it, if there is none.

    A backend that sets properties on the core names itself, and has one of its own.
    """
    try:
        import openvino  # noqa: PLC0415  # its absence must be an answer, not an import error
    except ImportError as e:
        raise UnavailableError(f"openvino cannot be imported ({e}); install it with: pip install openvino") from e
    return openvino, _core(openvino, whose)


@cache
def _core(openvino: ModuleType, _whose: str) -> Any:  # noqa: ANN401  # openvino ships no type information
    """A core that stays until the process ends.

    Its CPU plugin sets a stack for signals, and when it ends, the one that was set before. Two cores that end in the
    order they came in leave one that is no longer mapped, and the next signal, such as Ctrl-C, kills the process
    (OpenVINO 2026.4.1).
    """
    return openvino.Core()


def compiler(device: str, precision: str, fusion: str, stage: str = "run", threads: str = "") -> Compiler:
    """The compiler for `device`; UnavailableError where it is not here, UsageError for an unknown option."""
    one_of("fusion", fusion, FUSION)
    properties = PROPERTIES[one_of("precision", precision, tuple(PROPERTIES))]
    if threads:
        if not (threads.isascii() and threads.isdecimal() and 0 < int(threads) < MOST_THREADS):
            raise UsageError(f"threads: a number from 1 expected, {threads!r} given")
        properties = {**properties, "INFERENCE_NUM_THREADS": int(threads)}
    openvino, core = openvino_core()
    here = core.available_devices
    # GPU.0 may be asked for as GPU
    if device not in here and not any(d.split(".")[0] == device for d in here):
        raise UnavailableError(f"openvino: device {device!r} is not here; devices found: {', '.join(here) or 'none'}")
    apart = device == "CPU" and stage == "run" and (os.cpu_count() or 1) > 1
    return Compiler(openvino, core, device, properties, fusion, stage, apart)


def one_of(option: str, value: str, legal: Sequence[str]) -> str:
    """The value of an option; UsageError if it is none of the legal ones."""
    if value not in legal:
        raise UsageError(f"{option}: one of {', '.join(legal)} expected, {value!r} given")
    return value


def words(e: BaseException) -> str:
    """The useful part of OpenVINO's message: what failed, without the place in its source."""
    lines = [x.strip() for x in str(e).splitlines() if x.strip()]
    useful = [x for x in lines if not x.startswith(("Exception from", "While validating"))] or lines
    return " ".join(useful)[:400] or type(e).__name__


def executed(compiled: CompiledModel) -> Iterator[tuple[str, Any]]:
    """Each executed layer: its type as the device's runtime model names it, and its node."""
    for node in compiled.get_runtime_model().get_ordered_ops():
        info = node.get_rt_info()
        yield info["layerType"].astype(str) if "layerType" in info else node.get_type_name(), node


# -- compiled models on disk, for the next process ---------------------------------------------------------------------
SIZE = 32
"""Bytes of a digest."""


class ModelCache:
    """A folder of compiled models, each named by all that it depends on; made when the first one is written.

    OpenVINO's own CACHE_DIR (2026.4.1) names a model by, among others, the names of its nodes, which differ with what
    the process made before. Here a file begins with a digest of its name and its bytes: whatever is broken, or belongs
    to another model, is compiled again and replaced.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def name(self, plan: Plan, options: object) -> str:
        """A model's name: of its plan, the weights in it, its symbols, the backend's options, and this translation."""
        h = hashlib.blake2b(_sources(), digest_size=SIZE)
        h.update(repr((plan.key, options)).encode())
        for t in plan.tensors:
            for n in (*t.ne, *t.nb, t.view_offs):
                h.update(str(expr_of(n) if isinstance(n, Sym) else n).encode() + b" ")
        return h.hexdigest()

    def compiled(self, compiler: Compiler, name: str, compile_: Callable[[], Any]) -> tuple[CompiledModel, str]:
        """The model `name` from its file, else from `compile_`; and a note for the witness that says which."""
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
        """Write all or nothing, whoever else writes the same."""
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
    """A digest of this package: another version of it emits other models of equal plans."""
    h = hashlib.blake2b(digest_size=SIZE)
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        h.update(path.read_bytes())
    return h.digest()
