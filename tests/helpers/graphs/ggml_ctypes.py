"""The real ggml as an oracle: calls its constructors by ctypes and reads the tensors back.

A *program* is a list of calls `[function, argument, …]`, in which a tensor is the index of the call that made it. As a
script this file executes programs from standard input, one JSON line each, and answers with one JSON line each. It
forks before it starts, so an assertion ends only a child: the answer is then `{"abort": message}` and the next program
runs in the next child. It imports little beyond the standard library, which keeps a fork under a millisecond.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

from conformance.ggml.lib.constructors import CONSTRUCTORS, KINDS, SETTERS
from conformance.ggml.lib.layout import CTensor, InitParams

Json = Any
"""What `json` can hold."""

_INT, _LONG, _SIZE = ctypes.c_int, ctypes.c_int64, ctypes.c_size_t


def library_path() -> str:
    """The shared library in the installed wheel, found without importing it."""
    spec = importlib.util.find_spec("xllamacpp")
    assert spec is not None, "xllamacpp, which carries the real ggml, must be installed to run this test"
    for folder in spec.submodule_search_locations or ():
        for pattern in ("*.so", "*.pyd", "*.dylib"):
            for path in sorted(Path(folder).glob(pattern)):
                return str(path)
    raise AssertionError(f"no shared library beside {spec.origin}")


def load() -> ctypes.CDLL:
    """The library, with the signatures that the tests use."""
    lib = ctypes.CDLL(library_path())
    lib.ggml_tensor_overhead.restype = ctypes.c_size_t
    assert lib.ggml_tensor_overhead() == ctypes.sizeof(CTensor) + 32
    lib.ggml_init.argtypes, lib.ggml_init.restype = (InitParams,), ctypes.c_void_p
    lib.ggml_reset.argtypes, lib.ggml_reset.restype = (ctypes.c_void_p,), None
    for name in ("ggml_type_name", "ggml_op_name", "ggml_unary_op_name", "ggml_glu_op_name"):
        getattr(lib, name).argtypes, getattr(lib, name).restype = (_INT,), ctypes.c_char_p
    for name, restype in (("type_size", _SIZE), ("blck_size", _LONG), ("is_quantized", ctypes.c_bool)):
        getattr(lib, f"ggml_{name}").argtypes, getattr(lib, f"ggml_{name}").restype = (_INT,), restype
    for name, kinds in CONSTRUCTORS.items():
        f = getattr(lib, f"ggml_{name}")
        f.argtypes, f.restype = (ctypes.c_void_p, *(KINDS[k] for k in kinds)), ctypes.c_void_p
    for name, kinds in SETTERS.items():
        f = getattr(lib, f"ggml_{name}")
        f.argtypes, f.restype = tuple(KINDS[k] for k in kinds), None
    for name in ("nbytes", "nelements", "nrows"):
        getattr(lib, f"ggml_{name}").argtypes, getattr(lib, f"ggml_{name}").restype = (ctypes.c_void_p,), _LONG
    lib.ggml_new_graph_custom.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_bool)
    lib.ggml_new_graph_custom.restype = ctypes.c_void_p
    lib.ggml_build_forward_expand.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    lib.ggml_build_forward_expand.restype = None
    lib.ggml_build_forward_select.argtypes = (ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p), _INT, _INT)
    lib.ggml_build_forward_select.restype = ctypes.c_void_p
    lib.ggml_graph_n_nodes.argtypes, lib.ggml_graph_n_nodes.restype = (ctypes.c_void_p,), _INT
    lib.ggml_graph_node.argtypes, lib.ggml_graph_node.restype = (ctypes.c_void_p, _INT), ctypes.c_void_p
    return lib


def names(lib: ctypes.CDLL, what: str, last: str) -> list[str]:
    """`ggml_<what>_name` from id 0 to the id of `last`: the table has no bounds check."""
    found: list[str] = []
    while last not in found:
        found.append(getattr(lib, f"ggml_{what}_name")(len(found)).decode())
    return found


class World:
    """A ggml context and what programs made in it."""

    def __init__(self) -> None:
        self.lib = load()
        self.ctx = self.lib.ggml_init(InitParams(1 << 24, None, True))
        self.ops = names(self.lib, "op", "GLU")
        self.unary = names(self.lib, "unary_op", "TRUNC")
        self.glu = names(self.lib, "glu_op", "SWIGLU_CLAMP")
        self.types = {
            self.lib.ggml_type_name(i).decode(): i for i in range(43) if self.lib.ggml_type_size(i) > 0
        }  # ids that ggml has dropped are left with size 0
        self.type_names = {i: name for name, i in self.types.items()}

    def run(self, program: list[list[Json]]) -> list[Json]:
        """What each call left: the tensor, the graph, or None of a setter."""
        self.lib.ggml_reset(self.ctx)
        made: list[Json] = []
        for function, *args in program:
            made.append(self._call(function, args, made))
        index = {p: i for i, p in enumerate(made) if isinstance(p, int)}
        return [self._read(p, index) if isinstance(p, int) else self._graph(p, index) for p in made]

    def _call(self, function: str, args: list[Json], made: list[Json]) -> Json:
        if function == "build_forward_expand":
            graph = self.lib.ggml_new_graph_custom(self.ctx, 1024, False)
            for i in args:
                self.lib.ggml_build_forward_expand(graph, made[i])
            return [self.lib.ggml_graph_node(graph, i) for i in range(self.lib.ggml_graph_n_nodes(graph))]
        if function == "build_forward_select":
            graph = self.lib.ggml_new_graph_custom(self.ctx, 1024, False)
            *tensors, idx = args
            array = (ctypes.c_void_p * len(tensors))(*(made[i] for i in tensors))
            self.lib.ggml_build_forward_select(graph, array, len(tensors), idx)
            return [self.lib.ggml_graph_node(graph, i) for i in range(self.lib.ggml_graph_n_nodes(graph))]
        if function in SETTERS:
            values = [self._argument(k, v, made) for k, v in zip(SETTERS[function], args, strict=True)]
            getattr(self.lib, f"ggml_{function}")(*values)
            return None
        values = [self._argument(k, v, made) for k, v in zip(CONSTRUCTORS[function], args, strict=True)]
        return getattr(self.lib, f"ggml_{function}")(self.ctx, *values)

    def _argument(self, kind: str, value: Json, made: list[Json]) -> Json:
        if kind == "t":
            return None if value is None else made[value]
        if kind == "y":
            return self.types[value]
        if kind == "u":
            return self.unary.index(value)
        if kind == "g":
            return self.glu.index(value)
        if kind in {"S", "n"}:
            return ((ctypes.c_int if kind == "S" else _LONG) * len(value))(*value)
        return value.encode() if kind == "s" else value

    def _graph(self, nodes: list[int] | None, index: dict[int, int]) -> Json:
        return None if nodes is None else [index.get(n, "unseen") for n in nodes]

    def _read(self, pointer: int, index: dict[int, int]) -> dict[str, Json]:
        t = CTensor.from_address(pointer)
        src = [self._refer(p, index) for p in t.src]
        while src and src[-1] is None:
            src.pop()
        return {
            "type": self.type_names[t.type],
            "ne": list(t.ne),
            "nb": list(t.nb),
            "op": self.ops[t.op],
            "op_params": list(t.op_params),
            "flags": t.flags,
            "src": src,
            "view_src": self._refer(t.view_src, index),
            "view_offs": t.view_offs,
            "name": t.name.decode(errors="ignore"),
        }

    def _refer(self, pointer: int | None, index: dict[int, int]) -> Json:
        """The call that made a tensor; the tensor itself where ggml made it on its own."""
        if pointer is None:
            return None
        return index[pointer] if pointer in index else self._read(pointer, index)


def run_programs(programs: Iterable[list[list[Json]]]) -> Iterator[Json]:
    """Each program's answer from the real ggml: what its calls left, or `{"abort": message}`."""
    text = "\n".join(json.dumps(p) for p in programs) + "\n"
    done = subprocess.run([sys.executable, __file__], input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    yield from map(json.loads, done.stdout.splitlines())


def _serve(lines: list[str], out: TextIO) -> None:
    world = World()
    k = 0
    while k < len(lines):
        k += _serve_in_child(world, lines, k, out)


def _serve_in_child(world: World, lines: list[str], first: int, out: TextIO) -> int:
    """Run programs from `first` on until one aborts; how many were answered."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        _child(world, lines[first:], write)
    os.close(write)
    with os.fdopen(read, encoding="utf-8") as pipe:
        answers = pipe.read().splitlines()
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        answers.append(json.dumps({"abort": signal.Signals(os.WTERMSIG(status)).name}))
    assert answers, f"a child died without an answer, status {status}"
    out.writelines(f"{a}\n" for a in answers)
    return len(answers)


PARKED = 400
"""Threads that ggml aborted in, which a child keeps before another takes over."""


def _child(world: World, lines: list[str], write: int) -> None:
    """Answer to the end, on a new thread after each abort of ggml.

    ggml's abort must not return, so the thread that it came in waits for ever and another goes on: a process for
    each would take most of the time.
    """
    pipe = os.fdopen(write, "w", encoding="utf-8")
    rest = iter(lines)
    parked = 0
    threading.stack_size(1 << 20)

    def answer(value: Json) -> None:
        pipe.write(json.dumps(value) + "\n")
        pipe.flush()

    def work() -> None:
        for line in rest:
            answer(world.run(json.loads(line)))
        os._exit(0)

    def aborted(message: bytes) -> None:
        nonlocal parked
        answer({"abort": message.decode(errors="replace")})
        parked += 1
        if parked == PARKED:
            os._exit(0)
        threading.Thread(target=work).start()
        threading.Event().wait()

    callback = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(aborted)
    world.lib.ggml_set_abort_callback(callback)
    work()


if __name__ == "__main__":
    _serve(sys.stdin.read().splitlines(), sys.stdout)
