"""Functions of ggml that no graph calls: nodes, quantisers, files, threads, training."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from mmap import mmap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader
from marks import needs_wheel

from conformance.backend.registry import Spec
from conformance.ggml.errors import UnavailableError, UsageError
from conformance.ggml.lib.constructors import CONSTRUCTORS
from conformance.ggml.lib.devices import Registry
from conformance.ggml.lib.library import Library
from conformance.judge.verdict import Verdict
from conformance.llama.live.functions import constructors, files, pools, quantisers, training
from conformance.llama.live.functions.family import FAMILY
from conformance.llama.live.functions.worker import WAYS, play
from conformance.run.isolation.isolate import Isolation
from conformance.suite.ops import KNOWN

Function = Callable[..., Any]
KEPT = ("gguf-write-8", "gguf-write-128")
"""Ways in which the wheel has a known fault."""
SLOW = ("quantize-iq1_s", "quantize-iq1_m", "quantize-iq2_s", "quantize-iq2_xs", "quantize-iq2_xxs")
"""Ways that make large tables first."""


@pytest.fixture(scope="module")
def library() -> Library:
    """The wheel's library."""
    found = Library()
    found.devices.load_all()
    return found


def _wrong(library: Library, way: str) -> str:
    return str(play(library, "CPU", way, 1)["wrong"])


@needs_wheel
def test_the_wheel_is_right(library: Library) -> None:
    """In every way but the known ones."""
    wrong = {way: text for way in WAYS if way not in SLOW and (text := _wrong(library, way))}
    assert tuple(wrong) == KEPT, wrong
    assert all("gguf_" in text for text in wrong.values())


@needs_wheel
def test_a_player_answers_by_id() -> None:
    """The worker plays a way; an unknown one is refused."""
    player = FAMILY.player(Spec("ggml"), Isolation(time_limit=60.0), None)
    try:
        assert player.play("functions/gguf-copy@1").verdict is Verdict.PASS
        assert player.play("functions/new-SET_ROWS@1").verdict is Verdict.PASS
    finally:
        player.close()
    with pytest.raises(UsageError, match="one of new-MUL_MAT"):
        FAMILY.build("functions/fly@1")
    assert len(FAMILY.ids("smoke")) == len(set(FAMILY.ids("smoke"))) == len(WAYS)


# nodes


def test_nearly_every_constructor_is_called() -> None:
    """By cases of its op; the others make leaves, or nodes from those that are called."""
    called = Counter(call.name for op in KNOWN for i in constructors.case_ids(op) for call in constructors.calls(i))
    lacking = {name.removesuffix("_inplace") for name in CONSTRUCTORS.keys() - called.keys()}
    assert lacking <= {
        "new_tensor_1d", "new_tensor_2d", "new_tensor_3d", "cont_1d", "cont_2d", "cont_3d", "reshape_1d", "set_1d",
        "set_2d", "dup_tensor", "view_tensor", "argsort_top_k", "conv_1d", "conv_1d_ph", "conv_1d_dw", "conv_1d_dw_ph",
    }  # fmt: skip
    assert sum(called.values()) > 3000


def _spoilt(change: Callable[[Library, Any], None]) -> Callable[[Library, Function], Function]:
    """Return a fault of a constructor that changes the node it made."""

    def spoil(library: Library, function: Function) -> Function:
        def call(*arguments: Any) -> Any:  # noqa: ANN401  # as the function
            node = function(*arguments)
            change(library, library.struct(node))
            return node

        return call

    return spoil


def _no_source(_: Library, c: Any) -> None:  # noqa: ANN401  # a ctypes structure, as below
    c.src[2] = None


def _one_more(_: Library, c: Any) -> None:  # noqa: ANN401
    c.ne[0] += 1


def _other_param(_: Library, c: Any) -> None:  # noqa: ANN401
    c.op_params[1] += 1


def _other_type(library: Library, c: Any) -> None:  # noqa: ANN401
    c.type = library.types["f16"]


def _own_bytes(_: Library, c: Any) -> None:  # noqa: ANN401
    c.view_src = None


def _apart(_: Library, c: Any) -> None:  # noqa: ANN401
    c.nb[3] *= 2


@needs_wheel
@pytest.mark.parametrize(
    ("op", "function", "change", "said"),
    [
        ("SET_ROWS", "set_rows", _no_source, "ggml_set_rows: src[2]: "),  # as until #16318
        ("TIMESTEP_EMBEDDING", "timestep_embedding", _one_more, "ggml_timestep_embedding: ne "),  # as until #15932
        ("SOFT_MAX", "soft_max_ext", _other_param, "ggml_soft_max_ext: op_params "),
        ("MUL_MAT", "mul_mat", _other_type, "ggml_mul_mat: type f32 expected, f16 found"),
        ("SCALE", "scale_inplace", _own_bytes, "ggml_scale_inplace: view_src: "),
        ("UNARY.RELU", "relu", _other_param, "ggml_relu: op_params "),
        ("CONCAT", "concat", _apart, "ggml_concat: nb "),
    ],
)
def test_a_wrong_node_is_found(
    library: Library,
    op: str,
    function: str,
    change: Callable[[Library, Any], None],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The text names the constructor and the field, and has a case."""
    own = library.function

    def find(symbol: str) -> Any:  # noqa: ANN401  # ctypes' own
        found = own(symbol)
        return Changed(found, _spoilt(change)(library, found)) if symbol == f"ggml_{function}" else found

    monkeypatch.setattr(library, "function", find)
    text = _wrong(library, f"new-{op}")
    assert text.startswith(said), text
    assert f"(ops/{op}-" in text


class Changed:
    """A ctypes function, called in another way."""

    function: Any
    call: Function

    def __init__(self, function: Any, call: Function) -> None:  # noqa: ANN401  # ctypes' own
        vars(self).update(function=function, call=call)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self.function, name, value)

    def __call__(self, *arguments: Any) -> Any:  # noqa: ANN401  # as the function
        """Call the other one."""
        return self.call(*arguments)


@needs_wheel
def test_a_constructor_that_a_library_lacks_is_unsupported(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older library lacks some; the way says which."""
    own = library.function
    monkeypatch.setattr(library, "function", lambda s: None if s == "ggml_roll" else own(s))
    assert play(library, "CPU", "new-ROLL", 1) == {"unsupported": "this ggml exports no ggml_roll"}


# quantisers


def _address(data: np.ndarray[Any, Any]) -> int:
    return int(data.__array_interface__["data"][0])


def _leaves_a_byte(quantize: Function) -> Function:
    """Leave a byte of each row as it was, as ggml did before #19861."""

    def call(type_: int, x: int, out: int, start: int, *rest: Any) -> Any:  # noqa: ANN401  # C's arguments, as below
        byte = (ctypes.c_uint8 * 1).from_address(out + 2)
        before = byte[0]
        done = quantize(type_, x, out, start, *rest)
        byte[0] = before
        return done

    return call


def _ignores_start(quantize: Function) -> Function:
    return lambda type_, x, out, _, *rest: quantize(type_, x, out, 0, *rest)


def _writes_behind(quantize: Function) -> Function:
    def call(type_: int, x: int, out: int, *rest: Any) -> Any:  # noqa: ANN401
        done = quantize(type_, x, out, *rest)
        ctypes.memset(out + quantisers.ROWS * done // max(1, rest[1]), 0, 1)
        return done

    return call


def _halves(quantize: Function) -> Function:
    """The first block of each row is that of half the values."""

    def call(type_: int, x: int, out: int, start: int, n: int, width: int, weights: Any) -> Any:  # noqa: ANN401
        values = np.ctypeslib.as_array((ctypes.c_float * (n * width)).from_address(x + 4 * start)).copy()
        values.reshape(n, width)[:, :32] /= 2
        full = np.zeros(start + values.size, np.float32)
        full[start:] = values
        return quantize(type_, _address(full), out, start, n, width, weights)

    return call


def _says_less(quantize: Function) -> Function:
    return lambda *a: quantize(*a) - 1


@needs_wheel
@pytest.mark.parametrize(
    ("type_", "fault", "said"),
    [
        ("q4_0", _leaves_a_byte, "over other bytes"),
        ("iq4_xs", _leaves_a_byte, "values differ"),
        ("q8_0", _ignores_start, "row by row"),
        ("q4_K", _writes_behind, "bytes behind the last row were written"),
        ("q5_1", _halves, "values differ"),
        ("iq4_nl", _halves, "an NMSE of"),
        ("q6_K", _says_less, "630 bytes expected, 629 returned"),
    ],
)
def test_a_wrong_quantiser_is_found(
    library: Library, type_: str, fault: Callable[[Function], Function], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text names the values, the type and the importance matrix."""
    own = library.function

    def find(symbol: str) -> Any:  # noqa: ANN401  # ctypes' own
        found = own(symbol)
        return Changed(found, fault(found)) if symbol == "ggml_quantize_chunk" else found

    monkeypatch.setattr(library, "function", find)
    text = _wrong(library, f"quantize-{type_}")
    assert said in text, text
    assert f"values as {type_}" in text


# files


def test_the_file_is_what_the_package_reads(tmp_path: Path) -> None:
    """The package `gguf`, which shares no code with the writer here, finds the values and tensors."""
    known = {int(t) for t in GGMLQuantizationType}
    file = replace(files.whole(64), tensors=[t for t in files.whole().tensors if t.type in known])
    path = tmp_path / "x.gguf"
    path.write_bytes(file.bytes())
    reader = GGUFReader(path)
    fields = {name: f for name, f in reader.fields.items() if not name.startswith("GGUF.")}
    assert list(fields) == [key for key, _ in file.values]
    assert fields["value.i16.0"].contents() == -(2**15)
    assert fields["strings"].contents() == list(files.STRINGS)
    assert reader.alignment == 64
    for info, tensor in zip(file.tensors, reader.tensors, strict=True):
        assert (tensor.name, int(tensor.tensor_type)) == (info.name, info.type)
        assert tensor.data.tobytes().startswith(files.content(info))  # the package takes Q8_1 for larger


def test_each_odd_file_is_odd_in_one_way() -> None:
    """All differ, and none is a file that is right."""
    raw = {name: file.bytes() for name, file in files.ODD.items()}
    assert len(set(raw.values())) == len(raw)
    assert files.File().bytes() not in raw.values()


def _accepts(library: Library, own: Function) -> Function:
    """Reads a valid file in place of any other."""
    valid = files.File().bytes()
    del library

    def call(path: bytes, params: Any) -> Any:  # noqa: ANN401  # C's arguments
        Path(path.decode()).write_bytes(valid)
        return own(path, params)

    return call


def _off_by_one(_: Library, own: Function) -> Function:
    return lambda *a: own(*a) + 1


def _writes_short(_: Library, own: Function) -> Function:
    def call(context: int, path: bytes, only_meta: Any) -> Any:  # noqa: ANN401  # C's arguments
        done = own(context, path, only_meta)
        raw = bytearray(Path(path.decode()).read_bytes())
        raw[100] ^= 0xFF
        Path(path.decode()).write_bytes(raw)
        return done

    return call


READS: Mapping[str, tuple[str, Callable[[Library, Function], Function], str]] = {
    "gguf-odd-key-twice": ("init_from_file", _accepts, "key-twice: NULL expected, a context found"),
    "gguf-truncated": ("init_from_file", _accepts, "the first 0 bytes of"),
    "gguf-read": ("get_val_u16", _off_by_one, "value.u16.0: 0 expected, 1 found"),
    "gguf-read-128": ("get_alignment", _off_by_one, "gguf_get_alignment: 128 expected, 129 found"),
    "gguf-write": ("write_to_file", _writes_short, "1 bytes wrong, byte 100 is "),
    "gguf-copy": ("set_kv", lambda _, __: lambda *_: None, "expected"),
}


@needs_wheel
@pytest.mark.parametrize("way", READS)
def test_a_wrong_reader_or_writer_is_found(library: Library, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text names the value or the byte."""
    name, fault, said = READS[way]
    own = library.function

    def find(symbol: str) -> Any:  # noqa: ANN401  # ctypes' own
        found = own(symbol)
        return Changed(found, fault(library, found)) if symbol == f"gguf_{name}" else found

    monkeypatch.setattr(library, "function", find)
    assert said in _wrong(library, way)


# threads


@needs_wheel
@pytest.mark.parametrize("way", pools.WAYS)
def test_a_thread_that_misses_its_rows_is_found(library: Library, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If one of the threads that a graph has more than the one before does nothing, the text names both numbers."""
    threads = [1, 1]
    own, compute = Registry.function, library.ggml.backend_graph_compute

    def function(registry: Registry, name: str, *rest: Any) -> Any:  # noqa: ANN401  # ctypes' own
        found = own(registry, name, *rest)
        if name != "ggml_backend_set_n_threads" or found is None:
            return found

        def set_threads(backend: int, n: int) -> None:
            threads.append(n)
            found(backend, n)

        return set_threads

    def computed(backend: int, graph: int) -> int:
        status = int(compute(backend, graph))
        if threads[-1] > threads[-2] > 1:
            library.set(results[graph], np.zeros(4, np.uint8))
        return status

    results: dict[int, int] = {}
    make = pools.Graphs.__init__

    def graphs(self: pools.Graphs, *arguments: Any) -> None:  # noqa: ANN401  # as the class
        make(self, *arguments)
        results.update(self.all)

    monkeypatch.setattr(pools.Graphs, "__init__", graphs)
    monkeypatch.setattr(Registry, "function", function)
    monkeypatch.setattr(library.ggml, "backend_graph_compute", computed)
    text = _wrong(library, way)
    assert f"with {threads[-1]} threads, after one with {threads[-2]}:" in text


@needs_wheel
def test_a_library_without_pools_is_unsupported(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older library has no thread pools; the way is UNSUPPORTED and says so."""
    own = Registry.function
    monkeypatch.setattr(Registry, "function", lambda r, n, *a: None if n == "ggml_threadpool_new" else own(r, n, *a))
    with pytest.raises(UnavailableError, match="no functions of thread pools"):
        pools.play(library, pools.POOL, 1)


HELD: list[Any] = []
"""Memory that a planted fault keeps."""


def _learns_nothing(_learn: Function, _trainer: training.Trainer) -> None:
    pass


def _keeps_memory(learn: Function, trainer: training.Trainer) -> None:
    learn(trainer)
    HELD.append(mmap(-1, 2 << 20))  # never what was free before


@needs_wheel
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (_learns_nothing, "the mean squared error of the weights fell from"),
        (_keeps_memory, "a session of ggml_opt_fit keeps"),
    ],
)
def test_a_fault_of_training_is_found(
    library: Library, fault: Function, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that stay as they are, and a session that forgets memory, as ggml did before #21592."""
    learn = training.Trainer.learn
    monkeypatch.setattr(training.Trainer, "learn", lambda self: fault(learn, self))
    assert said in _wrong(library, training.TRAIN)
    HELD.clear()
