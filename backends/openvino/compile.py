"""Compiling: the core, its devices and properties, and a model made of emitted nodes."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal, TypeAlias, get_args

from conformance.ggml.errors import BackendError, UnavailableError, UsageError

Precision = Literal["accuracy", "default"]
Fusion = Literal["auto", "on", "off"]

PROPERTIES: dict[Precision, dict[str, Any]] = {
    "accuracy": {"EXECUTION_MODE_HINT": "ACCURACY", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0},
    "default": {},
}
"""What a model is compiled with: f32 throughout, or whatever the device likes best."""

UNFUSED = {"SNIPPETS_MODE": "DISABLE"}
"""Makes the CPU plugin run elementwise ops one by one; a property of its own that another version may not know."""

INSTALL = "install it with: pip install openvino"


CompiledModel: TypeAlias = Any
"""An `openvino.CompiledModel`; openvino ships no type information."""


@dataclass(frozen=True, slots=True)
class Compiler:
    """A device and how to compile for it."""

    ov: ModuleType
    core: Any
    device: str
    properties: dict[str, Any]

    fusion: str = "auto"
    stage: str = "run"

    def compiled(self, results: list[Any], parameters: list[Any], *, served: bool = True) -> CompiledModel:
        """Make a model of nodes and compile it, or at stage `translate` have it interpreted.

        Args:
            results: result nodes, in the order of the outputs.
            parameters: parameter nodes, in the order of the inputs.
            served: whether it is what would be served: a model with its weights. Fusing kernels for one that only
                tests ops would take 40 % of the time; `fusion` decides for all if it is not `auto`.

        Raises:
            BackendError: the device's compiler refused it.
        """
        try:
            model = self.ov.Model(results, parameters)
        except RuntimeError as e:
            raise BackendError(f"OpenVINO {self.device} refused to compile: {words(e)}") from e
        return self.model(model, served=served)

    def model(self, model: Any, *, served: bool = True) -> CompiledModel:  # noqa: ANN401  # an openvino.Model
        """Compile a model; `served` and errors as `compiled` has them."""
        try:
            if self.stage == "translate":
                return _interpreted(model)
            if self.properties.get("EXECUTION_MODE_HINT") != "ACCURACY":
                served = _keep(self.core, model) or served
            fused = served if self.fusion == "auto" else self.fusion == "on"
            extra = {} if fused or self.device != "CPU" else UNFUSED
            try:
                return self.core.compile_model(model, self.device, {**self.properties, **extra})
            except RuntimeError as e:
                if not any(name in str(e) for name in extra):
                    raise
                return self.core.compile_model(model, self.device, self.properties)
        except RuntimeError as e:
            raise BackendError(f"OpenVINO {self.device} refused to compile: {words(e)}") from e

    def products(self) -> str:
        """What the device rounds the operands of matrix products to, as `Arithmetic.products` names it.

        Its hint says which float; 8-bit activations beside compressed weights are no nearer than F16.
        """
        if self.properties.get("EXECUTION_MODE_HINT") == "ACCURACY":
            return "float32"
        hint = self.core.get_property(self.device, "INFERENCE_PRECISION_HINT")
        return "bf16" if hint.get_type_name() == "bf16" else "f16"

    def versions(self) -> dict[str, str]:
        """OpenVINO's and the device plugin's."""
        found = {"openvino": self.ov.get_version()}
        for name, v in self.core.get_versions(self.device).items():
            found[f"openvino {name}"] = v.build_number
        return found

    def description(self) -> str:
        """The device's own full name."""
        return str(self.core.get_property(self.device, "FULL_DEVICE_NAME"))


def compiler(device: str, precision: str, fusion: str, stage: str = "run") -> Compiler:
    """The compiler for `device`.

    Raises:
        UnavailableError: OpenVINO or the device is not here; says how to get it, or what is here.
        UsageError: an unknown precision or fusion.
    """
    if fusion not in get_args(Fusion):
        raise UsageError(f"fusion: one of {', '.join(get_args(Fusion))} expected, {fusion!r} given")
    if precision not in get_args(Precision):
        raise UsageError(f"precision: one of {', '.join(get_args(Precision))} expected, {precision!r} given")
    try:
        import openvino  # noqa: PLC0415  # its absence must be an answer, not an import error
    except ImportError as e:
        raise UnavailableError(f"openvino: cannot be imported ({e}); {INSTALL}") from e
    core = openvino.Core()
    here = core.available_devices
    # GPU.0 may be asked for as GPU
    if device not in here and not any(d.split(".")[0] == device for d in here):
        raise UnavailableError(f"openvino: device {device!r} is not here; devices found: {', '.join(here) or 'none'}")
    return Compiler(openvino, core, device, PROPERTIES[precision], fusion, stage)  # type: ignore[index]  # checked above


def _keep(core: Any, model: Any) -> bool:  # noqa: ANN401  # an openvino.Core, an openvino.Model
    from .precise import keep  # noqa: PLC0415  # needs openvino, which may be absent until one is constructed

    return keep(core, model)


def _interpreted(model: Any) -> CompiledModel:  # noqa: ANN401  # an openvino.Model
    from .interpret import Interpreted  # noqa: PLC0415  # needs openvino, which may be absent until one is constructed

    return Interpreted(model)


def words(e: BaseException) -> str:
    """The useful part of OpenVINO's many lines: what failed, without where in its source."""
    lines = [x.strip() for x in str(e).splitlines() if x.strip()]
    kept = [x for x in lines if not x.startswith(("Exception from", "While validating"))] or lines
    return " ".join(kept)[:400] or type(e).__name__
