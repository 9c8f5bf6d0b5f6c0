"""Compiling for an NPU, or for the NPU plugin's own wrapper (NPUW) on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from backends.openvino.compile import ACCURACY, CompiledModel, Compiler, openvino_core, words
from conformance.ggml.errors import BackendError, UnavailableError

DEVICE = "NPU"
WRAPPER = {"NPU_USE_NPUW": "YES", "NPUW_DEVICES": "CPU", "NPUW_ONLINE_PIPELINE": "NONE"}
"""Properties that run a model through the plugin's wrapper on the CPU.

Only its pipelines NONE and JUST are correct (2026.4.1): the others were silently wrong for decoders of 1 to 3
layers."""


@dataclass(frozen=True, slots=True)
class NpuCompiler(Compiler):
    """OpenVINO's core with an NPU plugin, and its compile options."""

    @property
    def real(self) -> bool:
        """True if there is an NPU; otherwise its plugin's wrapper runs everything on the CPU."""
        return self.properties is not WRAPPER

    def label(self) -> str:
        """Return a description of what executes."""
        return DEVICE if self.real else f"CPU through the {DEVICE} plugin's wrapper"

    def products(self) -> str:
        """Return `f16` for an NPU (half precision), `float32` for the wrapper's accurate CPU."""
        return "f16" if self.real else "float32"

    def description(self) -> str:
        """Return the full name of the device that executes."""
        name = str(self.core.get_property(DEVICE if self.real else "CPU", "FULL_DEVICE_NAME"))
        return name if self.real else f"{name.strip()} through the NPU plugin's wrapper (no NPU on this machine)"

    def compiled(
        self,
        results: list[Any],
        parameters: list[Any],
        sinks: Sequence[Any] = (),
        *,
        served: bool = True,
        halves: bool = False,
    ) -> CompiledModel:
        """Return a `Split`: the computing part is compiled, the host does the rest."""
        from backends.openvino.nodes import origin  # noqa: PLC0415  # needs openvino, which is there by now

        del sinks, served, halves  # an NPU has no variables, and fusion is not configurable
        host = [i for i, r in enumerate(results) if origin(r).get_type_name() in ("Parameter", "Constant")]
        first: dict[tuple[str, int], int] = {}
        same: dict[int, int] = {}
        for i, r in enumerate(results):
            if i not in host and (j := first.setdefault(_value(r), i)) != i:
                same[i] = j
        device = self._part(results, parameters, list(first.values()), compiled=True)
        shapes = {i: tuple(results[i].get_output_shape(0)) for i in same}
        return Split(device, self._part(results, parameters, host), same, shapes)

    def _part(
        self, results: Sequence[Any], parameters: Sequence[Any], chosen: list[int], *, compiled: bool = False
    ) -> Part:
        from backends.openvino.nodes import ancestors  # noqa: PLC0415  # as above

        if not chosen:
            return Part(None, {}, {})
        own = [results[i] for i in chosen]
        used = ancestors(own)
        places = [i for i, p in enumerate(parameters) if p.get_name() in used]
        try:
            model = self.ov.Model(own, [parameters[i] for i in places])
            if compiled:
                model = self.core.compile_model(model, DEVICE, self.properties)
        except RuntimeError as e:
            raise BackendError(f"OpenVINO {self.label()} refused to compile: {words(e)}") from e
        return Part(model, {i: k for k, i in enumerate(places)}, {i: k for k, i in enumerate(chosen)})


@dataclass(frozen=True, slots=True)
class Part:
    """Some results of a model, with the parameters they need."""

    model: Any
    """The compiled model, or for the host an `openvino.Model`; None without results."""
    inputs: dict[int, int]
    """Index of a parameter in the whole -> in this part."""
    outputs: dict[int, int]


class Split:
    """A compiled model; results that are inputs or duplicates are left to the host.

    The wrapper (2026.4.1) refuses a model with two results of one value ("from_submodel != NO_LINK"), and one with a
    result that is an input, possibly cast and reshaped; or it returns uninitialised memory. A `Split` replaces an
    `openvino.CompiledModel`, and is its own infer request.
    """

    def __init__(self, device: Part, host: Part, same: dict[int, int], shapes: dict[int, tuple[int, ...]]) -> None:
        self._device, self._host, self._same, self._shapes = device, host, same, shapes
        self._request: Any = None
        self._inputs: dict[int, Any] = {}
        self._outputs: list[Any] = []
        """Inputs and outputs of the host's part."""
        self._copies: dict[int, Any] = {}

    def create_infer_request(self) -> Split:
        """Return itself, with a request of the device's part; a second one is never needed."""
        self._request = self._device.model and self._device.model.create_infer_request()
        return self

    def get_property(self, name: str) -> Any:  # noqa: ANN401  # as openvino.CompiledModel
        """Return a property of the compiled part; an empty list if there is none."""
        return [] if self._device.model is None else self._device.model.get_property(name)

    def set_input_tensor(self, i: int, tensor: Any) -> None:  # noqa: ANN401  # an openvino.Tensor
        """Use `tensor` as input `i` of each part that reads it."""
        if i in self._device.inputs:
            self._request.set_input_tensor(self._device.inputs[i], tensor)
        if i in self._host.inputs:
            self._inputs[self._host.inputs[i]] = tensor

    def set_output_tensor(self, i: int, tensor: Any) -> None:  # noqa: ANN401  # as above
        """Bind an output."""
        if i in self._device.outputs:
            self._request.set_output_tensor(self._device.outputs[i], tensor)
        else:
            self._copies[i] = tensor

    def get_output_tensor(self, i: int) -> Any:  # noqa: ANN401  # as above
        """Return an output."""
        if i in self._same:
            from openvino import Tensor  # noqa: PLC0415  # needs openvino, which is there by now

            return Tensor(self.get_output_tensor(self._same[i]).data.reshape(self._shapes[i]))
        if i in self._host.outputs:
            return self._outputs[self._host.outputs[i]]
        return self._request.get_output_tensor(self._device.outputs[i])

    def infer(self) -> None:
        """Run both parts."""
        from openvino import Tensor  # noqa: PLC0415  # as above

        if self._request is not None:
            self._request.infer()
        if self._host.model is not None:
            self._outputs = [Tensor(x.get_element_type(), x.get_shape()) for x in self._host.model.outputs]
            self._host.model.evaluate(self._outputs, [self._inputs[k] for k in range(len(self._host.inputs))])
        for i, tensor in self._copies.items():
            tensor.data[:] = self.get_output_tensor(i).data


def _value(result: Any) -> tuple[str, int]:  # noqa: ANN401  # an openvino.Node
    """Return the name and output index of `result`'s value, ignoring reshapes."""
    source = result.input_value(0)
    while source.get_node().get_type_name() == "Reshape":
        source = source.get_node().input_value(0)
    return source.get_node().get_name(), source.get_index()


def npu_compiler() -> NpuCompiler:
    """Return the compiler for an NPU or its plugin's CPU wrapper; else UnavailableError."""
    openvino, core = openvino_core("npu")
    here = core.available_devices
    if any(d.split(".")[0] == DEVICE for d in here):
        return NpuCompiler(openvino, core, DEVICE, {})
    devices = f"devices found: {', '.join(here) or 'none'}"
    try:
        core.get_versions(DEVICE)
    except RuntimeError as e:
        raise UnavailableError(
            f"npu: no NPU here, and no NPU plugin whose wrapper could run on the CPU ({words(e)}); {devices}"
        ) from e
    if "CPU" not in here:
        raise UnavailableError(f"npu: neither an NPU nor a CPU here; {devices}")
    core.set_property("CPU", ACCURACY)  # not passed on by the wrapper
    return NpuCompiler(openvino, core, DEVICE, WRAPPER)
