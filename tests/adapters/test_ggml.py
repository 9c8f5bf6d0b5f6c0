"""The adapter to the real ggml: what it finds out about a library, and that graphs run there as the case says."""

from __future__ import annotations

import ctypes
import importlib.util
import platform
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import needs_wheel
from numpy.typing import NDArray

from backends.cpu import CpuBackend
from backends.ggml import GgmlBackend, _quantize, probe
from backends.ggml.probe import flash_attn_step
from conformance.backend.interface import Session
from conformance.backend.registry import Spec
from conformance.case.case import Case, Step
from conformance.ggml import types
from conformance.ggml.arithmetic import GGML_CPU, Arithmetic
from conformance.ggml.errors import BackendError, GraphError, UnavailableError, UsageError
from conformance.ggml.graph import Graph
from conformance.ggml.lib import layout
from conformance.ggml.lib.context import sub_op
from conformance.ggml.lib.devices import Device
from conformance.ggml.lib.layout import FROM_FLOAT
from conformance.ggml.lib.library import Library, tensor_layout, unary_ids
from conformance.ggml.ops.build import Builder
from conformance.ggml.quants import QUANTIZERS, quantizer
from conformance.ggml.tensor import FLAG_COMPUTE, VIEW_OPS, Bytes, Tensor, nbytes, pack
from conformance.ggml.types import GLU_OPS, OPS, TYPES, UNARY_OPS, GGMLType
from conformance.judge.verdict import Verdict
from conformance.llama import captured
from conformance.run.execute import Memory, Reuse, execute
from conformance.run.isolation.isolate import open_backend
from conformance.run.runner import Runner
from conformance.suite import alias, ops

pytestmark = needs_wheel

g = Builder()


@pytest.fixture(scope="module")
def backend() -> Iterator[GgmlBackend]:
    """The installed wheel's CPU device, in this process."""
    made = GgmlBackend()
    yield made
    made.close()


@pytest.fixture(scope="module")
def library(backend: GgmlBackend) -> Library:
    """The library behind it."""
    return backend._library


def test_devices_that_share_tensors_run_models_only() -> None:
    """Live families need them open; each node of a single graph is refused, and an unknown part named."""
    made = GgmlBackend(device="CPU+CPU")
    try:
        assert made.info().device == "CPU+CPU"
        (said,) = made.supports(Graph([g.scale(g.new_tensor_1d(types.F32, 4), 2.0)]))
        assert not said
        assert said.reason == "CPU+CPU: llama.cpp splits the tensors of its models only"
    finally:
        made.close()
    with pytest.raises(UsageError, match="device 'Vulkan7' is unknown"):
        GgmlBackend(device="CPU+Vulkan7")


def raw(values: NDArray[np.generic]) -> Bytes:
    """An array's bytes."""
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)


def ramp(t: Tensor, start: float = 1.0) -> Bytes:
    """Bytes of F32 `t`: start, start + 1 and so on."""
    return raw(np.arange(start, start + nbytes(t) // 4, dtype="<f4"))


def case_of(graph: Graph, inputs: dict[Tensor, Bytes], persistent: dict[Tensor, Bytes] | None = None) -> Case:
    """A case of one step that computes every node and has each as an output."""
    for node in graph:
        node.flags |= FLAG_COMPUTE
    made = Case("test/ggml@0", persistent or {}, [Step(graph, inputs, tuple(graph))])
    made.validate()
    return made


def run(backend: GgmlBackend, case: Case, outputs: Sequence[Tensor] | None = None) -> dict[Tensor, Bytes]:
    """Outputs of a case of one step."""
    step = case.steps[0]
    with backend.open(case) as session:
        return dict(session.compute(step.graph, step.inputs, step.outputs if outputs is None else outputs))


# What a library is


def test_ids_of_the_installed_library(library: Library) -> None:
    """The pinned wheel is the ggml that `ops.py` and `types.py` were read from: every id is as it stands there."""
    assert library.ops == {name: i for i, name in enumerate(OPS)}
    assert library.sub_ops["UNARY"][1] == {name: i for i, name in enumerate(UNARY_OPS)}
    assert library.sub_ops["GLU"][1] == {name: i for i, name in enumerate(GLU_OPS)}
    assert library.types == {name: t.id for name, t in types.TYPES.items()}
    assert library.version == layout.EXPECTED


def table(*entries: str) -> SimpleNamespace:
    """A library whose op table is `entries`, with memory that is no name behind it."""
    texts = [ctypes.c_char_p(e.encode()) for e in entries]
    pointers = [ctypes.cast(t, ctypes.c_void_p).value for t in texts]
    behind = ctypes.cast(ctypes.c_char_p(b"x+y"), ctypes.c_void_p).value
    return SimpleNamespace(op_name=lambda i: pointers[i] if i < len(pointers) else behind, keep=texts)


def test_ids_are_taken_by_name() -> None:
    """Another version's order, ops we do not know and a shorter table give right ids and no wrong one."""
    assert layout.ids(table("NONE", "MUL", "FUTURE_OP", "ADD", "GLU").op_name, OPS) == {
        "NONE": 0,
        "MUL": 1,
        "ADD": 3,
        "GLU": 4,
    }
    assert layout.ids(table("NONE", "ADD").op_name, OPS) == {"NONE": 0, "ADD": 1}


def test_sub_ops_are_read_from_their_constructors(library: Library) -> None:
    """Where a library's names of UNARY stand in another order than its ids, as in b5456, its constructors count."""
    found = unary_ids(library)
    assert found == {name: i for i, name in enumerate(UNARY_OPS) if name != "XIELU"}


def test_sub_ops_are_translated_by_name() -> None:
    """`op_params[0]` of a UNARY becomes this library's id of the same name; a name it lacks is an error."""
    node = g.unary(g.new_tensor_1d(types.F32, 4), "SILU")
    other = SimpleNamespace(
        ops={"UNARY": 0}, sub_ops={"UNARY": (UNARY_OPS, {"SILU": 3})}, lacks=lambda _: "", version="0.1"
    )
    assert sub_op(other, node) == 3  # type: ignore[arg-type]  # as much of a Library as is asked
    absent = g.unary(g.new_tensor_1d(types.F32, 4), "TRUNC")
    with pytest.raises(BackendError, match=r"UNARY TRUNC is not in ggml 0\.1"):
        sub_op(other, absent)  # type: ignore[arg-type]  # the same


def test_another_struct_is_refused_by_both_versions(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library with another tensor layout is unavailable, and both versions are named.

    The layout of the table that fits is used.
    """
    larger = SimpleNamespace(**{**vars(library.ggml), "tensor_overhead": lambda: 400})
    with pytest.raises(
        UnavailableError, match=rf"ggml 9\.9 .*ggml {layout.EXPECTED}, .* leaves name b'n{{95}}'; b'n{{63}}'"
    ):
        tensor_layout(larger, "ggml 9.9 (lib.so)", library.ops, library.types["f16"])
    smaller = SimpleNamespace(**{**vars(library.ggml), "tensor_overhead": lambda: 360})
    with pytest.raises(UnavailableError, match="is 368 bytes or more; 360 bytes found"):
        tensor_layout(smaller, "ggml 9.9 (lib.so)", library.ops, library.types["f16"])

    class Moved(ctypes.Structure):
        _fields_ = (("buffer", ctypes.c_void_p), ("type", ctypes.c_int32), *layout.CTensor._fields_[2:])

    moved = layout.Layout(tensor=Moved)
    monkeypatch.setattr("conformance.ggml.lib.library.layouts", lambda _: [moved])
    with pytest.raises(UnavailableError, match=r"ggml_new_tensor_4d leaves type 1; 0 found"):
        tensor_layout(library.ggml, "ggml 9.9 (lib.so)", library.ops, library.types["f16"])
    fitting = layout.Layout()
    monkeypatch.setattr("conformance.ggml.lib.library.layouts", lambda _: [moved, fitting])
    assert tensor_layout(library.ggml, "ggml 9.9 (lib.so)", library.ops, library.types["f16"]) is fitting


def test_a_type_laid_out_differently_is_refused_by_name(library: Library) -> None:
    """A type of another size, or absent, is named with both layouts; the others stay usable."""
    other = SimpleNamespace(
        **{**vars(library.ggml), "type_size": lambda i: 99 if i == types.Q4_0.id else library.ggml.type_size(i)}
    )
    ids, differing = layout.type_ids(other)
    assert set(differing) == {"q4_0"}
    assert "18 bytes for 32" in differing["q4_0"]
    assert "99 bytes" in differing["q4_0"]
    assert ids["f16"] == types.F16.id


def test_what_is_no_ggml(tmp_path: Path) -> None:
    """A missing path, a folder without ggml, a file that is no library and a library that is no ggml say so."""
    (tmp_path / "text.so").write_text("no library")
    stranger = importlib.util.find_spec("numpy.random._common")
    assert stranger is not None
    assert stranger.origin is not None
    for path, words in (
        (tmp_path / "nothing.so", "no such file or folder"),
        (tmp_path, "a folder with libggml.so"),
        (tmp_path / "text.so", "cannot be loaded"),
        (Path(stranger.origin), f"written for builds from {re.escape(layout.OLDEST)} on: it exports no ggml_init"),
    ):
        with pytest.raises(UnavailableError, match=words):
            GgmlBackend(lib=str(path))


def test_unknown_words_list_the_known() -> None:
    """A device, buffer type or thread count that does not exist is answered with those that do."""
    with pytest.raises(UsageError, match=r"device 'GPU7' is unknown.* its devices: CPU"):
        GgmlBackend(device="GPU7")
    with pytest.raises(UsageError, match=r"buffer 'FAST' is unknown.* its buffer types: CPU"):
        GgmlBackend(buffer="FAST")
    with pytest.raises(UsageError, match="threads must be a number from 1, '0' found"):
        GgmlBackend(threads="0")


def test_info_says_what_executes(backend: GgmlBackend) -> None:
    """Device and versions come from the library."""
    info = backend.info()
    assert (info.backend, info.device) == ("ggml", "CPU")
    assert info.versions["ggml"] == layout.EXPECTED
    assert int(info.versions["backend API"]) >= 1
    assert next(b for b in backend.buffer_types()).name == "CPU"


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="other machines have other kernels")
def test_tiles_of_attention_are_computed(library: Library) -> None:
    """The probe finds F32 sums in the pinned wheel for rows of any length from 64 tokens on, and none for fewer."""
    cpu = library.devices.by_name("CPU")
    assert flash_attn_step(library, cpu, 64) == 1
    assert flash_attn_step(library, cpu, 63) == 0


@pytest.mark.parametrize(("width", "sums"), [("float32", {}), ("f16", {"f16": "f16"})])
def test_arithmetic_in_f16_is_recognised(
    library: Library, monkeypatch: pytest.MonkeyPatch, width: str, sums: dict[str, str]
) -> None:
    """The probes recognise a device that multiplies and sums in F16, and one that does so in F32."""
    cpu = library.devices.by_name("CPU")
    declared = Arithmetic("a", flash_attn_sum={"f16": "f16"}, flash_attn_weights=width, sums=width)
    device = CpuBackend().computing_in(declared)
    monkeypatch.setattr(probe, "GgmlSession", lambda *about: device.open(about[4]))
    assert probe.flash_attn_weights.__wrapped__(library, cpu) == width
    assert probe.mul_mat_sum.__wrapped__(library, cpu) == sums


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_threads_of_attention_sum_their_cells_by_themselves(threads: int) -> None:
    """The declared rounding follows the number of threads, so that results stay within the budget."""
    case_id = "ops/FLASH_ATTN_EXT-f16+f16-q=64x1x8,k=64x777x2,sinks=1@639"
    backend = GgmlBackend(threads=str(threads))
    assert backend.arithmetic().flash_attn_parts == threads
    (result,) = Runner().run(Spec("ggml", (("threads", str(threads)),)), [ops.build(case_id)])
    assert result.verdict is Verdict.PASS, result.detail


def test_a_use_that_the_library_lacks_is_unsupported(backend: GgmlBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """A parameter or node that the library would ignore in silence is refused by its sign.

    The same nodes are accepted where the sign is exported.
    """
    library = backend._library
    node = g.scale_bias(g.new_tensor_1d(types.F32, 4), 2.0, 1.0)
    assert backend.supports_op(node)
    library._symbols["ggml_scale_bias"] = False
    monkeypatch.setattr(library, "flags_compute", False)
    try:
        node.flags = FLAG_COMPUTE
        assert "it exports no ggml_scale_bias" in backend.supports_op(node).reason
        node = g.scale(g.new_tensor_1d(types.F32, 4), 2.0)
        assert "computes every node" in backend.supports_op(node).reason
        node.flags = FLAG_COMPUTE
        assert backend.supports_op(node)
    finally:
        library._symbols.clear()


def test_arithmetic_is_read_from_the_library(backend: GgmlBackend) -> None:
    """The library's own table and the one kept for libraries that hide theirs agree; x86 quantises as SIMD does."""
    found = backend.arithmetic()
    assert (found.mul_mat, found.flash_attn) == (GGML_CPU.mul_mat, GGML_CPU.flash_attn)
    assert "f32" not in found.mul_mat
    if platform.machine() in ("x86_64", "AMD64"):
        assert found.quantize == "simd"


@pytest.mark.parametrize("name", QUANTIZERS)
def test_each_quantiser_is_recognised(name: str) -> None:
    """A library that stores Q8_0 and Q8_K like one of them declares it, as those for ARM and RISC-V do."""

    def store(type_: GGMLType) -> Any:  # noqa: ANN401  # a ctypes function
        def from_float(x: int, y: int, n: int) -> None:
            row = np.frombuffer(ctypes.string_at(x, 4 * n), "<f4")
            block = quantizer(name)(type_, row).tobytes()
            ctypes.memmove(y, block, len(block))

        return FROM_FLOAT(from_float)

    kept = {t: store(TYPES[t]) for t in ("q8_0", "q8_K")}
    address = {t: ctypes.cast(f, ctypes.c_void_p).value for t, f in kept.items()}
    traits: Any = {t: (None, SimpleNamespace(from_float=a)) for t, a in address.items()}
    assert _quantize(traits) == name
    assert _quantize({}) == "reference"


# supports_op


def test_a_no_has_a_reason(backend: GgmlBackend, library: Library) -> None:
    """The library's own no, an op and a type that a version lacks, and a node that needs them: each says which."""
    a = g.new_tensor_2d(types.F32, 256, 4)
    rows = g.set_rows(g.new_tensor_2d(types.IQ2_XXS, 256, 8), a, g.new_tensor_1d(types.I64, 4))
    refused = backend.supports_op(rows)
    assert not refused
    assert "refuses SET_ROWS iq2_xxs[256, 8, 1, 1]" in refused.reason
    ops, known = library.ops, library.types
    node = g.sqr(a)
    after = g.add(node, a)
    try:
        library.ops = {k: v for k, v in ops.items() if k != "SQR"}
        lacking = backend.supports(Graph([node, after]))
        assert [bool(s) for s in lacking] == [False, False]
        assert "op SQR is not in ggml" in lacking[1].reason
        library.types, library.other_types = {k: v for k, v in known.items() if k != "f32"}, {"f32": "is not there"}
        assert "type f32 is not there" in backend.supports_op(after).reason
    finally:
        library.ops, library.types, library.other_types = ops, known, {}
    assert backend.supports_op(node)


# compute


def test_outputs_are_packed(backend: GgmlBackend) -> None:
    """A permuted view and a view with gaps arrive with gaps closed, `ne[0]` fastest."""
    a = g.new_tensor_3d(types.F32, 4, 3, 2)
    made = g.scale(a, 2.0)
    turned = g.permute(made, 2, 0, 1, 3)
    part = g.view_2d(made, 2, 3, made.nb[1], 8)
    case = case_of(Graph([made, turned, part]), {a: ramp(a)})
    found = run(backend, case)
    whole = np.arange(1, 25, dtype="<f4").reshape(2, 3, 4) * 2
    assert found[made].tobytes() == whole.tobytes()
    assert found[turned].tobytes() == pack(found[made], turned).tobytes()
    assert found[part].tobytes() == np.ascontiguousarray(whole[0, :, 2:]).tobytes()


def test_an_output_is_what_the_node_held_right_after_it_ran(backend: GgmlBackend) -> None:
    """Nodes overwritten in place later, through a view or whole, still give their own value."""
    a, b = g.new_tensor_1d(types.F32, 8), g.new_tensor_1d(types.F32, 4)
    first = g.scale(a, 2.0)
    early = g.view_1d(first, 4, 0)
    stored = g.cpy(b, g.view_1d(first, 4, 16))
    doubled = g.scale_inplace(first, 10.0)
    nodes = [first, early, stored.src[1], stored, doubled]
    case = case_of(Graph([n for n in nodes if n is not None]), {a: ramp(a), b: ramp(b, 100)})
    found = {t: v.view("<f4").tolist() for t, v in run(backend, case).items()}
    assert found[first] == [2, 4, 6, 8, 10, 12, 14, 16]
    assert found[early] == [2, 4, 6, 8]
    assert found[stored] == [100, 101, 102, 103]
    assert found[doubled] == [20, 40, 60, 80, 1000, 1010, 1020, 1030]
    assert run(backend, case, [doubled])[doubled].view("<f4").tolist() == found[doubled]


def test_reference_kernels_have_no_tiles(backend: GgmlBackend) -> None:
    """`ref=on` leaves FLASH_ATTN_EXT's tiles, whose sums differ in the last bits, and says so in its arithmetic."""
    case = ops.build("ops/FLASH_ATTN_EXT-f16+f16-q=64x130x2,k=64x256x2,mask=256x130,hide=causal@1")
    ref = GgmlBackend(ref="on")
    try:
        (own,), (other,) = (run(b, case).values() for b in (backend, ref))
        assert (backend.arithmetic().flash_attn_tile > 0, ref.arithmetic().flash_attn_tile) == (True, 0)
    finally:
        ref.close()
    assert own.tobytes() != other.tobytes()
    np.testing.assert_allclose(own.view("<f4"), other.view("<f4"), rtol=1e-2, atol=1e-3)
    assert Runner().run(Spec.parse("ggml?ref=on"), [case])[0].verdict is Verdict.PASS
    with pytest.raises(UsageError, match="ref=on need mode=graph"):
        GgmlBackend(ref="on", mode="sched")


def test_an_output_between_two_results_touches_both(backend: GgmlBackend, library: Library) -> None:
    """The allocator puts the op's result of `dst=between` right behind one output and right before another."""
    sample = [i for i in ops.ids("standard") if i.rpartition("@")[0].endswith("dst=between")][::9]
    for case_id in sample:
        case = ops.build(case_id)
        (step,) = case.steps
        below, above, _, dst = step.outputs
        if not all(backend.supports(step.graph)):
            continue
        with backend.open(case) as session:
            session.compute(step.graph, step.inputs, step.outputs)
            at = {t: library.struct(session._plan.at[t]).data for t in (below, above, dst)}  # type: ignore[attr-defined]
        assert (at[dst] - at[below], at[above] - at[dst]) == (nbytes(below), nbytes(dst)), case_id
    assert len(sample) > 40


def test_the_same_graph_with_other_outputs(backend: GgmlBackend) -> None:
    """Asking for more outputs of a graph that ran before keeps their memory: ggml's allocator would reuse it."""
    a = g.new_tensor_1d(types.F32, 8)
    nodes = [g.scale(a, 2.0)]
    for _ in range(6):
        nodes.append(g.scale(nodes[-1], 2.0))
    case = case_of(Graph(nodes), {a: ramp(a)})
    step = case.steps[0]
    with backend.open(case) as session:
        last = session.compute(step.graph, step.inputs, nodes[-1:])
        every = session.compute(step.graph, step.inputs, nodes)
        again = session.compute(step.graph, {a: ramp(a, 5)}, nodes)
    assert last[nodes[-1]].tobytes() == every[nodes[-1]].tobytes()
    for i, n in enumerate(nodes):
        assert every[n].tobytes() == raw(np.arange(1, 9, dtype="<f4") * 2 ** (i + 1)).tobytes()
        assert again[n].tobytes() == raw(np.arange(5, 13, dtype="<f4") * 2 ** (i + 1)).tobytes()


@pytest.mark.parametrize("what", ["eps", "edge", "outputs"])
@pytest.mark.parametrize("memory", [Memory, Reuse])
def test_a_graph_in_the_objects_of_another_is_built_anew(backend: GgmlBackend, memory: type[Memory], what: str) -> None:
    """A caller may build its next graph in the same objects, or compute one again with other inputs."""
    case = alias.build(f"alias/differs={what},order=aab,shared=1@7")
    for own, again in zip(execute(backend, case).steps, execute(backend, case, memory=memory(case)).steps, strict=True):
        for t, data in own.all.items():
            np.testing.assert_array_equal(again.all[t], data)


def test_nodes_without_compute_do_not_run(backend: GgmlBackend) -> None:
    """A node that lacks the flag writes nothing, not even into a cache."""
    cache, a, index = g.new_tensor_2d(types.F32, 4, 3), g.new_tensor_2d(types.F32, 4, 1), g.new_tensor_1d(types.I64, 1)
    skipped, made = g.set_rows(cache, a, index), g.sqr(a)
    skipped.flags, made.flags = 0, FLAG_COMPUTE
    where = raw(np.array([1], "<i8"))
    case = Case(
        "test/ggml@0", {cache: ramp(cache)}, [Step(Graph([skipped, made]), {a: ramp(a), index: where}, (made,))]
    )
    for flags, expected in ((0, ramp(cache)[16:32]), (FLAG_COMPUTE, ramp(a))):
        skipped.flags = flags
        with backend.open(case) as session:
            session.compute(case.steps[0].graph, case.steps[0].inputs, (made,))
            assert session.read(cache)[16:32].tobytes() == expected.tobytes()
            assert session.witness().nodes == (2 if flags else 1)


def test_every_unary_is_the_one_it_says(backend: GgmlBackend) -> None:
    """Sub-ops reach the library by name: a few with an unmistakable result."""
    x = np.linspace(-3, 3, 16, dtype="<f4")
    a = g.new_tensor_1d(types.F32, 16)
    expected = {"ABS": np.abs(x), "NEG": -x, "SGN": np.sign(x), "RELU": np.maximum(x, 0), "FLOOR": np.floor(x)}
    nodes = {name: g.unary(a, name) for name in expected}
    found = run(backend, case_of(Graph(nodes.values()), {a: raw(x)}))
    for name, node in nodes.items():
        assert found[node].view("<f4").tolist() == expected[name].tolist()


def test_an_error_text_is_of_the_graph_that_failed(backend: GgmlBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the library logged about an earlier case stands in no later case's error."""
    x = g.new_tensor_1d(types.F32, 4)
    case = case_of(Graph([g.add(x, x)]), {x: ramp(x)})
    backend._library.log.lines.append("error: an earlier case went wrong")
    monkeypatch.setattr(backend._library.ggml, "backend_graph_compute", lambda *_: -1)
    with backend.open(case) as session, pytest.raises(BackendError, match="returned FAILED") as error:
        session.compute(case.steps[0].graph, case.steps[0].inputs, case.steps[0].outputs)
    assert "earlier case" not in str(error.value)


def test_wrong_bytes_are_named(backend: GgmlBackend) -> None:
    """A leaf without bytes, or with too many, is an error and not a crash."""
    a = g.new_tensor_1d(types.F32, 4)
    node = g.sqr(a)
    case = case_of(Graph([node]), {a: ramp(a)})
    with backend.open(case) as session:
        with pytest.raises(GraphError, match="takes 16 bytes, 3 of uint8 given"):
            session.compute(case.steps[0].graph, {a: np.zeros(3, np.uint8)}, (node,))
        with pytest.raises(GraphError, match="neither persistent nor among the inputs"):
            session.compute(case.steps[0].graph, {}, (node,))
        with pytest.raises(GraphError, match="not a persistent tensor"):
            session.read(a)


program = st.lists(
    st.tuples(
        st.sampled_from(("add", "mul", "scale", "scale_inplace", "add_inplace", "store", "view")),
        st.integers(0, 99),
        st.integers(0, 99),
    ),
    min_size=1,
    max_size=14,
)


@settings(max_examples=200)
@given(program, st.data())
def test_outputs_do_not_depend_on_what_else_is_asked(  # noqa: C901  # every way to ask
    backend: GgmlBackend, calls: list[tuple[str, int, int]], data: st.DataObject
) -> None:
    """Every node of a random graph has the value of a walk, whichever outputs are requested.

    The graphs have views and in-place nodes, and nodes may share memory.
    """
    a, b = g.new_tensor_1d(types.F32, 8), g.new_tensor_1d(types.F32, 8)
    memory = {a: np.arange(1, 9, dtype="<f4"), b: np.arange(-3, 5, dtype="<f4")}
    inputs = {t: raw(v.copy()) for t, v in memory.items()}
    pool = [a, b]
    right: dict[Tensor, NDArray[np.float32]] = {}

    def held(t: Tensor) -> NDArray[np.float32]:
        return memory[t.root][t.view_offs // 4 :][: t.ne[0]]

    def ran(t: Tensor, value: NDArray[np.float32]) -> None:
        if t.view_src is None:
            memory[t] = value.astype("<f4")
        elif t.op not in VIEW_OPS:
            held(t)[:] = value
        pool.append(t)
        right[t] = held(t).copy()

    for what, i, j in calls:
        x, y = pool[i % len(pool)], pool[j % len(pool)]
        if what == "view":
            size = 1 + j % x.ne[0]
            ran(g.view_1d(x, size, 4 * (i % (x.ne[0] - size + 1))), held(x))
        elif "scale" in what:
            ran(getattr(g, what)(x, 0.5), held(x) * np.float32(0.5))
        elif x.ne != y.ne:
            continue
        elif what == "store":
            if x.root is not y.root:
                ran(g.cpy(x, y), held(x).copy())
        elif what != "add_inplace" or x.root is not y.root:
            value = held(x) * held(y) if what == "mul" else held(x) + held(y)
            ran(getattr(g, what)(x, y), value)
    if not right:
        return
    nodes = list(right)
    graph = Graph(nodes)
    case = case_of(graph, {t: inputs[t] for t in graph.leafs()})
    wanted = data.draw(st.lists(st.sampled_from(nodes), unique=True))
    for outputs in (nodes, wanted):
        found = run(backend, case, outputs)
        for t in outputs:
            np.testing.assert_array_equal(found[t].view("<f4"), right[t], err_msg=str(t))


# buffers


def test_weights_go_where_every_use_is_supported() -> None:
    """In CPU_REPACK only the weight that it has a kernel for is placed; the others stay, with the reason noted."""
    backend = GgmlBackend()
    if "CPU_REPACK" not in {b.name for b in backend.buffer_types()}:
        pytest.skip("this machine's ggml repacks nothing")
    x = g.new_tensor_2d(types.F32, 64, 3)
    rng = np.random.default_rng(1)
    weights = {g.new_tensor_2d(t, 64, 16): t for t in (types.Q4_0, types.F16, types.Q4_0)}
    q4, f16, looked_up = weights
    for t, name in zip(weights, ("q4", "f16", "looked_up"), strict=True):
        g.set_name(t, name)
    blocks = rng.integers(0, 256, (16 * 2, 18), np.uint8)
    blocks[:, :2] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    halves = raw(rng.standard_normal(64 * 16).astype("<f2"))
    index = g.new_tensor_1d(types.I32, 2)
    nodes = [*(g.mul_mat(w, x) for w in weights), g.get_rows(looked_up, index)]
    persistent = {q4: raw(blocks), f16: halves, looked_up: raw(blocks)}
    inputs = {x: raw(rng.standard_normal(64 * 3).astype("<f4")), index: raw(np.array([3, 1], "<i4"))}
    case = case_of(Graph(nodes), inputs, persistent)
    plain = run(backend, case)
    backend.close()
    repacking = GgmlBackend(buffer="CPU_REPACK")
    with repacking.open(case) as session:
        found = session.compute(case.steps[0].graph, case.steps[0].inputs, nodes)
        witness = session.witness()
        for w, data in persistent.items():
            assert session.read(w).tobytes() == data.tobytes()
    repacking.close()
    assert witness.bytes["CPU_REPACK"] >= nbytes(q4)
    assert witness.bytes["CPU_REPACK"] < 2 * nbytes(q4)
    assert [n.split(" ")[0] for n in witness.notes] == ["f16", "looked_up"]
    assert "refuses GET_ROWS" in witness.notes[1]
    for n in nodes:
        np.testing.assert_allclose(found[n].view("<f4"), plain[n].view("<f4"), rtol=1e-4, atol=1e-4)


# the main job


def exact(session: Session, case: Case, *, every_node: bool) -> int:
    """Replay a recording freely; how many values were compared. Each is equal to the bit, or the test fails."""
    compared = 0
    for k, step in enumerate(case.steps):
        recorded = [t for t in step.expected if t not in case.persistent]
        outputs = recorded if every_node else [t for t in recorded if t in step.outputs]
        found = session.compute(step.graph, step.inputs, outputs)
        caches = [t for t in step.expected if t in case.persistent]
        for t in (*outputs, *caches):
            value = found[t] if t in found else pack(session.read(t), t, 0)
            assert np.array_equal(value, step.expected[t]), f"step {k}: {t}"
            compared += 1
    return compared


@pytest.mark.parametrize("case_id", captured.FAMILY.ids("full"))
@pytest.mark.parametrize("every_node", [False, True])
def test_a_recording_is_repeated_to_the_bit(case_id: str, every_node: bool) -> None:
    """One thread and weights in the default buffer reproduce llama.cpp's recording.

    Logits and caches of every step, and every node, through the worker process.
    """
    case = captured.FAMILY.build(case_id)
    backend = open_backend(Spec("ggml"))
    try:
        if backend.info().versions["ggml"] not in str(case.provenance):
            pytest.skip("recorded with another ggml")
        assert all(s for step in case.steps for s in backend.supports(step.graph))
        with backend.open(case) as session:
            assert exact(session, case, every_node=every_node) >= 5 * len(case.steps)
    finally:
        backend.close()


def test_a_graph_rebuilt_in_the_same_objects_is_built_again() -> None:
    """Its worker makes the next graph of the same `Graph` and `Tensor` objects."""
    runner = Runner()
    try:
        ids = ["relations/memory-l=1,embd=32,heads=2,kv=1,ff=32,vocab=32,run=p9.d3@1"]
        (result,) = runner.run(Spec("ggml"), [runner.case(i) for i in ids])
        assert result.verdict is Verdict.PASS, result.sentence()
    finally:
        runner.close()


@needs_wheel
def test_a_device_is_asked_in_the_process_that_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if another process had asked, and died: ggml-opencl loads kernels when it is asked."""
    monkeypatch.setattr(Device, "type", "GPU")
    backend = GgmlBackend()
    asked = []
    answer = backend._ggml.backend_dev_supports_op

    def count(device: int, node: int) -> bool:
        asked.append(node)
        return bool(answer(device, node))

    monkeypatch.setattr(backend._ggml, "backend_dev_supports_op", count)
    case = next(c for c in map(ops.build, ops.ids("smoke")) if c.id.startswith("ops/ADD-f32"))
    backend.open(case).close()
    assert len(asked) >= len(case.steps[0].graph)
    backend.close()
