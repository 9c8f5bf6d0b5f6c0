"""ggml itself, any version, by ctypes: `ggml?lib=BUILD&device=NAME&buffer=NAME&threads=N`."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import closing, suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import ClassVar, TypeVar

import numpy as np

from conformance.backend.interface import YES, Backend, BufferType, DeviceInfo, Session, Support, no
from conformance.backend.measure import clock_of
from conformance.backend.profile import read
from conformance.case.case import Case
from conformance.ggml.arithmetic import EXACT, GGML_CPU, UNDECLARED, Arithmetic, Mixed, requantising
from conformance.ggml.errors import BackendError, UnavailableError, UsageError
from conformance.ggml.graph import Graph
from conformance.ggml.lib.context import refusal
from conformance.ggml.lib.devices import Device
from conformance.ggml.lib.driver import driver_of
from conformance.ggml.lib.layout import FROM_FLOAT, CpuTypeTraits, TypeTraits
from conformance.ggml.lib.library import Library
from conformance.ggml.lib.rpc import attach
from conformance.ggml.quants import QUANTIZERS, quantizer
from conformance.ggml.tensor import Tensor, computes
from conformance.ggml.types import F32, Q8_0, Q8_K, GGMLType

from .placement import addresses, homes, supports
from .probe import flash_attn_splits, flash_attn_step, flash_attn_weights, mul_mat_sum
from .sched import SchedSession, SplitSession
from .session import GgmlSession, GuardSession

_S = TypeVar("_S", bound=SchedSession)
CHOICES = {
    "memory": ("reused", "fresh"),
    "mode": ("graph", "sched"),
    "guard": ("off", "on"),
    "caches": ("read", "opaque"),
    "uncomputed": ("keep", "drop"),
    "products": ("float32", "bf16", "f16"),
    "ref": ("off", "on"),
}
"""Option -> its values, default first."""


SMALL = 20
"""Least number of nodes at a time for which ggml-openvino converts the host's weights.

See its `is_naive`. Only weights of GET_ROWS are on the host."""
_ROWS = [np.array([top, *(top * (2 * k + 1) / 254 for k in range(127)), *[0.0] * 128], "<f4") for top in (127.0, 29.0)]
"""Values halfway between two steps; with 127 the scale is exactly 1, with 29 it is rounded."""


class GgmlBackend(Backend):
    """ggml itself.

    Args: lib: a library that exports all of ggml, or a folder with libggml and its parts; the installed wheel if empty.
    On the command line any name of a build (`builds.source.locate`). device: a name as in `ggml_backend_dev_name`; CPU
    if empty; `CPU+CPU` for two that share each tensor of llama.cpp's models. buffer: buffer type for weights, as named
    by `buffer_types`; a weight is placed there if every node that uses it is supported there, as llama.cpp decides. The
    device's default if empty. threads: number of compute threads. One, unless something is measured: small graphs on
    busy cores are slow with more, and results can differ in the last bits. memory: where each graph of a session is
    made: `reused`, in the memory of the previous one, as llama.cpp does; `fresh`, at addresses that no graph of the
    session had. mode: `graph`: the device computes each graph and owns all memory; `sched`: as llama.cpp runs it, with
    `ggml_backend_sched` over the device and the CPU (`sched.py`). guard: `on`: every tensor lies between guard bytes,
    and a write to them is an error (`GuardSession`). caches: `opaque` if the device stores them in its own state; their
    bytes are then not checked. uncomputed: `drop` if nodes without FLAG_COMPUTE are left out of a scheduler's graph,
    for a library whose llama.cpp, unlike that of a recording, builds no such nodes. products: type to which the device
    rounds the operands of matrix products; other than `float32`, the tolerance is wider. profile: a file of `conform
    precision`: the measured precision profile of the device. requant: how the device stores quantised weights, a mode
    of `ggml.quants.requant`; the reference imitates it. variant: the CPU library to load, such as `haswell`, of a build
    with several; the best one if empty. rpc: `HOST:PORT` of an RPC server, whose devices are `RPC0` and on; `loopback`
    starts one of the same build, which computes on its CPU. ref: `on` calls `ggml_backend_cpu_set_use_ref`: no fusion,
    no tiles in FLASH_ATTN_EXT.

    Raises:
        UnavailableError: no such library, or one that does not fit; names both versions.
        UsageError: the library has no such device or buffer type; lists those it has.
    """

    batch: ClassVar[int] = 64
    places: ClassVar[frozenset[str] | None] = frozenset({"lib", "rpc", "profile"})
    builds: ClassVar[frozenset[str]] = frozenset({"lib"})
    audited: ClassVar[Mapping[str, str]] = {"guard": "on"}

    def __init__(
        self,
        lib: str = "",
        device: str = "",
        buffer: str = "",
        threads: str = "1",
        memory: str = "reused",
        mode: str = "graph",
        guard: str = "off",
        caches: str = "read",
        uncomputed: str = "keep",
        products: str = "float32",
        requant: str = "none",
        variant: str = "",
        rpc: str = "",
        profile: str = "",
        ref: str = "off",
    ) -> None:
        if not threads.isdecimal() or int(threads) < 1:
            raise UsageError(f"ggml: threads must be a number from 1, {threads!r} found")
        for (option, values), value in zip(
            CHOICES.items(), (memory, mode, guard, caches, uncomputed, products, ref), strict=True
        ):
            if value not in values:
                raise UsageError(f"ggml: {option}: one of {', '.join(values)} expected, {value!r} found")
        if profile and (products != EXACT.products or requant != "none"):
            raise UsageError(
                "ggml: profile= has the rounding of the device: products and requant cannot be combined with it"
            )
        if mode == "sched" and "on" in {guard, ref}:
            raise UsageError("ggml: guard=on and ref=on need mode=graph: a scheduler has its own memory and backends")
        self._ref = ref == "on"
        self._memory, self._guard, self._opaque = memory, guard == "on", caches == "opaque"
        self._drop = uncomputed == "drop"
        self._products, self._stored = products, requantising(requant)
        self._threads = int(threads)
        self._library = library = _load(lib, self._threads, variant)
        self._named = bool(lib)
        self._ggml = library.ggml
        self._server = attach(library, rpc)
        parts = [library.devices.by_name(name) for name in (device or "CPU").split("+")]
        self._device = parts[0]
        self._name = "+".join(part.name for part in parts)
        self._splits = len(parts) > 1
        self._buft = self._device.buffer_type
        self._bufts = self._device.buffer_types()
        if buffer and buffer not in self._bufts:
            raise UsageError(
                f"ggml: buffer {buffer!r} is unknown to device {self._name} of {library.title}; "
                f"its buffer types: {', '.join(self._bufts)}"
            )
        self._weights = self._bufts[buffer] if buffer else self._buft
        self._cpu = library.devices.by_name("CPU") if mode == "sched" else None
        self.by_case = self._cpu not in (None, self._device)
        self._split: tuple[Case, list[frozenset[Tensor]] | None] | None = None
        """The last queried case, and the device's nodes in it."""
        self._profile = profile_of(profile, self) if profile else None
        on_host = self._server is None and self._device.type == "CPU"
        self.threads = self._threads if on_host and mode == "graph" else None
        if self._server is None and not on_host:
            self.batch = 1  # type: ignore[misc]  # this device's: each kernel it compiles may take its time, or crash
        self.fragile = self._device.software
        # with a scheduler, too: ggml-opencl's buffer types answer nothing before, they read a null pointer
        self._backend: int | None = self._device.start(self._threads, ref=self._ref)

    def info(self) -> DeviceInfo:
        """Return the library's version, its device, and the CPU features it uses."""
        lib, g, device = self._library, self._ggml, self._device
        description = device.description
        versions = {"ggml": lib.version, "backend API": str(device.registry.api_version)}
        if lib.files and self._named:
            versions |= {"library": str(lib.files[0]), **lib.made}
        if self._server is None and device.type != "CPU" and (driver := driver_of(description)):
            versions["driver"] = driver
        if g.commit is not None and g.commit() != b"unknown":
            versions["commit"] = g.commit().decode()
        features = " ".join(device.features())
        return DeviceInfo("ggml", self._name, f"{description} ({features})" if features else description, {**versions})

    def buffer_types(self) -> Sequence[BufferType]:
        """Return the device's default type, its host type, and extra ones such as CPU_REPACK."""
        g = self._ggml
        out = []
        for name, buft in self._bufts.items():
            most = g.backend_buft_get_max_size(buft)
            limit = most if most < 2**63 - 1 else None
            out.append(BufferType(name, g.backend_buft_is_host(buft), g.backend_buft_get_alignment(buft), limit))
        return out

    def arithmetic(self) -> Arithmetic:
        """Return the arithmetic of the profile, of the CPU's tables, or of a device's options.

        `products` and `requant` declare that of another device, which is undeclared without them.
        """
        if self._profile is not None:
            return self._profile
        if self._server is not None or self._device.type == "CPU":
            return cpu_arithmetic(self._library, self._threads, ref=self._ref)
        if self._products == EXACT.products:
            return UNDECLARED if self._stored == EXACT else self._stored
        return replace(self._stored, name=f"{self._stored.name}-{self._products}", products=self._products)

    def supports_op(self, node: Tensor) -> Support:
        """Return `ggml_backend_dev_supports_op` for the node rebuilt in the library."""
        return self.supports(Graph([node]))[0]

    def supports(self, graph: Graph) -> list[Support]:
        """Return `supports_op` of every node, rebuilt once; with a scheduler the CPU may support it.

        Devices that share each tensor, such as `CPU+CPU`, run llama.cpp's models only.
        """
        if self._splits:
            return [no(f"{self._name}: llama.cpp splits the tensors of its models only")] * len(graph)
        own = self._supported(graph, self._device, self._name)
        if self._cpu is None:
            return own
        behind = self._supported(graph, self._cpu, "CPU")
        return [s or b for s, b in zip(own, behind, strict=True)]

    def supports_case(self, case: Case) -> Support:
        """Refuse if the scheduler gives every computing node to the CPU: the device is not tested."""
        shared = self._on_device(case)
        if shared is None or any(shared) or not any(computes(n) for s in case.steps for n in s.graph):
            return YES
        own = (zip(s.graph, self._supported(s.graph, self._device, self._name), strict=True) for s in case.steps)
        said = (answer.reason for n, answer in chain.from_iterable(own) if not answer and computes(n))
        return no(next(said, f"the scheduler gives no node to {self._name}"))

    def arithmetic_in(self, case: Case) -> Arithmetic:
        """Return the rounding for `case`: with a scheduler, that of the device that runs each node."""
        shared = self._on_device(case)
        if shared is None:
            return self.arithmetic()
        own, behind = self.arithmetic(), cpu_arithmetic(self._library, self._threads)
        small = replace(own, name=f"{own.name} of small graphs", rows={}) if own.rows else own
        nodes: dict[Tensor, Arithmetic] = {n: behind for s in case.steps for n in s.graph}
        for step, here in zip(case.steps, shared, strict=True):
            for split in _splits(step.graph, here):
                nodes |= dict.fromkeys(split, small if len(split) < SMALL else own)
        for one in (own, small):
            if all(a is one for n, a in nodes.items() if computes(n)):
                return one
        order = zlib.crc32(bytes(0 if a is behind else 1 if a is own else 2 for a in nodes.values()))
        return Mixed(f"{own.name} beside {behind.name}, shared out as {order:08x}", nodes=nodes)

    def _on_device(self, case: Case) -> list[frozenset[Tensor]] | None:
        """Return each step's nodes that the scheduler gives to the device; None if unknown."""
        if self._cpu is None or not self.by_case:
            return None
        if self._split is None or self._split[0] is not case:
            found: list[frozenset[Tensor]] | None = None
            with suppress(BackendError), closing(self._scheduled(SplitSession, case, self._cpu)) as session:
                found = [session.on_device(s.graph, s.outputs) for s in case.steps]
            self._split = case, found
        return self._split[1]

    def supports_placed(self, graph: Graph, tensor: Tensor, buffer: int) -> list[Support]:
        """Return `supports` while `tensor` lies in an empty buffer of the type, as in llama.cpp.

        UnavailableError if this version of ggml cannot represent a tensor of `graph`.
        """
        if reason := next(filter(None, (refusal(self._library, t) for t in graph.tensors())), ""):
            raise UnavailableError(reason)
        name, buft = list(self._bufts.items())[buffer % len(self._bufts)]
        answers = supports(self._library, self._device, buft, graph, tensor)
        why = (
            f"ggml_backend_dev_supports_op of {self._name} (ggml {self._library.version}) with {tensor.name} in {name}"
        )
        return [YES if s else no(f"{why} refuses {_spell(n)}") for n, s in zip(graph, answers, strict=True)]

    def _supported(self, graph: Graph, device: Device, name: str) -> list[Support]:
        library, tensors = self._library, graph.tensors()
        lacking: dict[Tensor, str] = {}
        """Tensor that this library cannot represent -> the reason."""
        for t in tensors:
            below = (lacking[s] for s in (*t.src, t.view_src) if s is not None and s in lacking)
            if reason := refusal(library, t) or library.too_old(t) or next(below, ""):
                lacking[t] = reason
        with addresses(library, [t for t in tensors if t not in lacking]) as at:
            taken = {n for n in graph if n in at and device.supports_op(at[n])}
        refuses = f"ggml_backend_dev_supports_op of {name} (ggml {library.version}) refuses"
        return [YES if n in taken else no(lacking.get(n) or f"{refuses} {_spell(n)}") for n in graph]

    def open(self, case: Case) -> Session:
        """Allocate and fill weights and caches, placed by `Case.placement` if the device can.

        BackendError for no memory, or a tensor that this version of ggml cannot represent.
        """
        if self._cpu is not None:
            return self._scheduled(SchedSession, case, self._cpu)
        if self.threads is None:  # as a scheduler asks: ggml-opencl loads kernels of ARGSORT when it is asked
            for step in case.steps:
                self.supports(step.graph)
        places, notes = homes(self._library, self._device, self._bufts, self._weights, case)
        kind = GuardSession if self._guard else GgmlSession
        backend, clock = self._backend or 0, clock_of(self.threads)
        return kind(self._library, self._name, backend, self._buft, case, places, notes, self._memory, clock)

    def _scheduled(self, kind: type[_S], case: Case, cpu: Device) -> _S:
        return kind(
            self._library,
            self._device,
            cpu,
            list(self._bufts.values()),
            self._weights,
            case,
            self._memory,
            self._threads,
            opaque=self._opaque,
            drop=self._drop,
        )

    def close(self) -> None:
        """Free the device; the library stays loaded."""
        if self._backend is not None:
            self._ggml.backend_free(self._backend)
            self._backend = None
        if self._server is not None:
            self._server.close()
        self._library.close()


def _load(lib: str, threads: int, variant: str) -> Library:
    """Load the library, with the CPU library that `variant` names, if any."""
    if threads > (os.cpu_count() or 1):  # waiting threads must not spin where others have work
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    library = Library(lib)
    if variant:
        library.devices.load_variant(variant)
    return library


def profile_of(path: str, backend: Backend) -> Arithmetic:
    """Return the arithmetic of the profile at `path`; UsageError for an unfit one."""
    profile = read(Path(path))
    profile.check(backend.info(), path)
    return profile.arithmetic(f"profile {path}")


def cpu_arithmetic(library: Library, threads: int = 1, *, ref: bool = False) -> Arithmetic:
    """Return the rounding of this library's CPU device, from its own tables and functions.

    MUL_MAT rounds activations to `vec_dot_type` of the weights, FLASH_ATTN_EXT rounds Q to that of K, and quantising is
    that of `from_float` for values between two steps. `probe` finds the
    rows that FLASH_ATTN_EXT sums in F32, and whether its threads share cells; with `ref` neither is so.
    """
    cpu = library.devices.by_name("CPU")
    step = 0 if ref else flash_attn_step(library, cpu, GGML_CPU.flash_attn_tile)
    parts = threads if threads > 1 and not ref and flash_attn_splits(library, cpu) else 1
    tile = GGML_CPU.flash_attn_tile if step else 0
    base = replace(
        GGML_CPU,
        mul_mat_sum=mul_mat_sum(library, cpu),
        flash_attn_weights=flash_attn_weights(library, cpu),
        flash_attn_tile=tile,
        flash_attn_step=step or 1,
        flash_attn_parts=parts,
    )
    traits = library.cpu_traits()
    if not traits:
        return replace(base, quantize="reference")
    names = {i: name for name, i in library.types.items()}
    to = {name: names.get(cpu.vec_dot_type, F32.name) for name, (_, cpu) in traits.items() if cpu.vec_dot}
    vec_dot = {name: type_ for name, type_ in to.items() if type_ != F32.name}
    return replace(base, mul_mat=vec_dot, flash_attn=vec_dot, quantize=_quantize(traits))


def _quantize(traits: Mapping[str, tuple[TypeTraits, CpuTypeTraits]]) -> str:
    """Return the name of the quantiser with the library's bytes for Q8_0 (and Q8_K)."""
    same = [[name for name in QUANTIZERS if _stores(traits, t, name)] for t in (Q8_0, Q8_K)]
    return next(chain((n for n in same[0] if n in same[1]), same[0]), "reference")


def _stores(traits: Mapping[str, tuple[TypeTraits, CpuTypeTraits]], type_: GGMLType, name: str) -> bool:
    """Return True if the library stores rows of values between two steps as a quantiser does."""
    address = traits[type_.name][1].from_float if type_.name in traits else 0
    if not address:
        return name == "reference"
    for row in _ROWS:
        block = np.zeros(type_.type_size * row.size // type_.blck_size, np.uint8)
        FROM_FLOAT(address)(row.ctypes.data, block.ctypes.data, row.size)
        if block.tobytes() != quantizer(name)(type_, row).tobytes():
            return False
    return True


def _splits(graph: Graph, here: AbstractSet[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the nodes that a scheduler gives the device at a time: those between the CPU's."""
    split: list[Tensor] = []
    for n in graph:
        if n in here or not computes(n):
            split.append(n)
        else:
            yield split
            split = []
    yield split


def _spell(node: Tensor) -> str:
    """Format as `MUL_MAT f32[64, 2, 1, 1] of f16[256, 64, 1, 1], f32[256, 2, 1, 1]`."""
    src = ", ".join(f"{s.type}{list(s.ne)}" for s in node.src if s is not None)
    return f"{node.op} {node.type}{list(node.ne)}" + (f" of {src}" if src else "")
