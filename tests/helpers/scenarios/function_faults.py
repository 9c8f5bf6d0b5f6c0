"""What a function of llama.cpp may do wrong: each spoils one, given the true one and the library."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

from faulty_device import Contexts, Device

from conformance.ggml.lib.layout import Batch
from conformance.ggml.lib.llama import Llama

Call = Callable[..., Any]
Rows = Any
"""`float[n_tokens][256]`."""
Spoil = Callable[[Call, Llama], Call]


def device(fault: Device) -> Spoil:
    """Of `init_from_model`: contexts run on a device with a fault."""
    return lambda call, library: Contexts(library, call, fault)


def nothing(result: object = None) -> Spoil:
    """Does nothing, and says that it did."""
    return lambda _call, _library: lambda *_: result


def arguments(change: Callable[..., tuple[Any, ...]]) -> Spoil:
    """Does with other arguments what it should."""
    return lambda call, _: lambda *given: call(*change(*given))


def put_once(call: Call, _: Llama) -> Call:
    """What was set first stays in each context."""
    seen: set[int] = set()

    def put(context: int, *rest: Any) -> int:  # noqa: ANN401  # C's arguments, here and below
        if context in seen:
            return 0
        seen.add(context)
        return int(call(context, *rest) or 0)

    return put


def first_answer(call: Call, _: Llama) -> Call:
    """What was asked for first is the answer for each context."""
    first: dict[int, Any] = {}

    def get(context: int, *rest: Any) -> Any:  # noqa: ANN401
        found = call(context, *rest)
        return first.setdefault(context, found)

    return get


# --- states


def loads_nothing(_: Call, _library: Llama) -> Call:
    """Says that it read all."""
    return lambda _context, _data, size, *_rest: size


def loses_a_cell(call: Call, library: Llama) -> Call:
    """After a load one cell is gone."""
    llama = library.llama

    def load(context: int, *rest: Any) -> Any:  # noqa: ANN401
        done = call(context, *rest)
        llama.memory_seq_rm(llama.get_memory(context), 0, 3, 4)
        return done

    return load


def refuses_late(_: Call, library: Llama) -> Call:
    """Refuses, and one cell is gone."""
    llama = library.llama

    def load(context: int, *_: Any) -> int:  # noqa: ANN401
        llama.memory_seq_rm(llama.get_memory(context), 0, 3, 4)
        return 0

    return load


def ends_early(call: Call, _: Llama) -> Call:
    """The last eighth is not copied."""

    def copy(context: int, data: int, size: int, *rest: Any) -> Any:  # noqa: ANN401
        n = size // 8
        ctypes.memset(data + size - n, 0, n)
        done = call(context, data, size, *rest)
        ctypes.memset(data + size - n, 0, n)
        return done

    return copy


def writes(other: Callable[[bytes], bytes]) -> Spoil:
    """A file has other bytes."""

    def spoil(call: Call, _: Llama) -> Call:
        def save(it: int, path: bytes, *rest: Any) -> Any:  # noqa: ANN401
            done = call(it, path, *rest)
            file = Path(path.decode())
            file.write_bytes(other(file.read_bytes()))
            return done

        return save

    return spoil


file_ends_early = writes(lambda data: data[:-64] + bytes(64))
"""The last 64 bytes do not reach the file."""


def loads_alone(call: Call, library: Llama) -> Call:
    """A sequence's load empties the whole memory first."""
    llama = library.llama

    def load(context: int, *rest: Any) -> Any:  # noqa: ANN401
        llama.memory_clear(llama.get_memory(context), False)  # C's signature
        return call(context, *rest)

    return load


def moves_after(call: Call, library: Llama) -> Call:
    """What was loaded stands one position later."""
    llama = library.llama

    def load(context: int, *rest: Any) -> Any:  # noqa: ANN401
        done = call(context, *rest)
        llama.memory_seq_add(llama.get_memory(context), 0, 0, -1, 1)
        return done

    return load


# --- memory


def cp_loses_a_cell(call: Call, library: Llama) -> Call:
    """A copy lacks one cell."""

    def copy(memory: int, source: int, to: int, *rest: int) -> None:
        call(memory, source, to, *rest)
        library.llama.memory_seq_rm(memory, to, 3, 4)

    return copy


def keep_loses_a_cell(call: Call, library: Llama) -> Call:
    """What is kept lacks one cell."""

    def keep(memory: int, seq: int) -> None:
        call(memory, seq)
        library.llama.memory_seq_rm(memory, seq, 3, 4)

    return keep


def keep_clears(_: Call, library: Llama) -> Call:
    """Nothing is kept."""
    return lambda memory, _seq: library.llama.memory_clear(memory, True)  # C's signature


def rm_takes_others(call: Call, library: Llama) -> Call:
    """A removal takes the first cell of another sequence along."""

    def rm(memory: int, seq: int, p0: int, p1: int) -> Any:  # noqa: ANN401
        done = call(memory, seq, p0, p1)
        for other in (0, 1):
            if seq not in (-1, other) and library.llama.memory_seq_pos_max(memory, other) > 0:
                call(memory, other, 0, 1)
        return done

    return rm


def adds_to_all(call: Call, _: Llama) -> Call:
    """A move of one sequence moves the next one too."""

    def add(memory: int, seq: int, *rest: int) -> None:
        call(memory, seq, *rest)
        call(memory, seq + 1, *rest)

    return add


def clears_a_sequence(_: Call, library: Llama) -> Call:
    """Of several sequences only the first one is forgotten."""
    return lambda memory, _data: library.llama.memory_seq_rm(memory, 0, -1, -1)


def clears_but_the_first(_: Call, library: Llama) -> Call:
    """The first cell of each sequence stays."""
    return lambda memory, _data: [library.llama.memory_seq_rm(memory, seq, 1, -1) for seq in (0, 1)]


# --- batches


def ids_of(batch: Batch) -> list[Any]:
    """The first sequence of each token, in place."""
    pointers = (ctypes.c_uint64 * batch.n_tokens).from_address(batch.seq_id)
    return [ctypes.c_int32.from_address(p) for p in pointers]


def next_token(batch: Batch, i: int) -> None:
    """Let token `i` of a batch be the one after it in the vocabulary."""
    tokens = (ctypes.c_int32 * batch.n_tokens).from_address(batch.token)
    tokens[i] = (tokens[i] + 1) % 128


def batch_where(holds: Callable[[Batch], bool], change: Callable[[Batch], None]) -> Spoil:
    """Changes some batches."""

    def spoil(call: Call, _: Llama) -> Call:
        def run(context: int, batch: Batch) -> Any:  # noqa: ANN401
            if holds(batch):
                change(batch)
            return call(context, batch)

        return run

    return spoil


def several(batch: Batch) -> bool:
    """Whether a batch of tokens has several sequences."""
    return bool(batch.token) and len({i.value for i in ids_of(batch)}) > 1


def ids(change: Callable[[int], int]) -> Spoil:
    """Changes the sequences of tokens, in batches of several."""

    def move(batch: Batch) -> None:
        for i in ids_of(batch):
            i.value = change(i.value)

    return batch_where(several, move)


def one_owner(batch: Batch) -> None:
    """A token of two sequences belongs to the first one alone."""
    (ctypes.c_int32 * batch.n_tokens).from_address(batch.n_seq_id)[:] = [1] * batch.n_tokens


def changes_later_ones(call: Call, _: Llama) -> Call:
    """From the third batch on that a context reads, the first token is another."""
    seen: dict[int, int] = {}

    def encode(context: int, batch: Batch) -> Any:  # noqa: ANN401
        seen[context] = seen.get(context, 0) + 1
        if seen[context] > 2:
            next_token(batch, 0)
        return call(context, batch)

    return encode


def clears_the_other(call: Call, library: Llama) -> Call:
    """What another context holds is lost when one decodes."""
    last: list[int] = []

    def decode(context: int, batch: Batch) -> Any:  # noqa: ANN401
        if last and last[-1] != context:
            library.llama.memory_clear(library.llama.get_memory(last[-1]), True)  # C's signature
        last.append(context)
        return call(context, batch)

    return decode


def after_refusal(undo: Callable[[Any, int], object]) -> Spoil:
    """A batch that is declined leaves its mark: `undo` gets llama.cpp's functions and the memory."""

    def spoil(call: Call, library: Llama) -> Call:
        def decode(context: int, batch: Batch) -> Any:  # noqa: ANN401
            status = call(context, batch)
            if status:
                undo(library.llama, library.llama.get_memory(context))
            return status

        return decode

    return spoil


def embeddings(change: Callable[[Rows], object]) -> Spoil:
    """Changes the rows that come in, `[n_tokens][256]`, in place."""

    def alter(batch: Batch) -> None:
        change((ctypes.c_float * 256 * batch.n_tokens).from_address(batch.embd))

    return batch_where(lambda batch: bool(batch.embd), alter)


def row_0(call: Call, _: Llama) -> Call:
    """The second result that is asked for is the first."""
    rows: dict[int, int] = {}

    def get(context: int, i: int) -> int:
        if i == 0 or context not in rows:
            rows[context] = call(context, i)
            return rows[context]
        return rows.pop(context)

    return get


# --- adapters


def scale_1(call: Call, _: Llama) -> Call:
    """Each adapter counts in full."""
    return lambda context, adapters, n, _scales: call(context, adapters, n, (ctypes.c_float * n)(*[1.0] * n))


def none_of_none(call: Call, _: Llama) -> Call:
    """No adapters at all are taken for no change."""
    return lambda context, adapters, n, scales: call(context, adapters, n, scales) if n else 0


def one_scale(call: Call, _: Llama) -> Call:
    """All adapters get the scale of the last one."""

    def put(context: int, adapters: Any, n: int, scales: Any) -> Any:  # noqa: ANN401
        return call(context, adapters, n, (ctypes.c_float * n)(*(scales[n - 1] for _ in range(n))))

    return put


def vectors_add_up(call: Call, _: Llama) -> Call:
    """A control vector is added to the one before; none takes nothing away."""
    sums: dict[int, Any] = {}

    def put(context: int, data: int | None, n: int, *rest: int) -> Any:  # noqa: ANN401
        if data is None:
            return 0
        new = (ctypes.c_float * n).from_address(data)
        sums[context] = (ctypes.c_float * n)(*(a + b for a, b in zip(sums.get(context, [0.0] * n), new, strict=True)))
        return call(context, ctypes.addressof(sums[context]), n, *rest)

    return put


def none_is_ignored(call: Call, _: Llama) -> Call:
    """A control vector is not taken away."""
    return lambda context, data, *rest: 0 if data is None else call(context, data, *rest)


def params(change: Callable[[Any], object]) -> Spoil:
    """Of `init_from_model`: other parameters than were asked for."""

    def spoil(call: Call, _: Llama) -> Call:
        def make(model: int, of: Any) -> Any:  # noqa: ANN401
            change(of)
            return call(model, of)

        return make

    return spoil


def in_other_models(**spoils: Spoil) -> dict[str, Spoil]:
    """Spoilt in contexts of models other than the first one that has a context."""
    first: list[int] = []
    others: set[int] = set()

    def make(call: Call, library: Llama) -> Call:
        bad = spoils["init_from_model"](call, library) if "init_from_model" in spoils else call

        def init(model: int, of: Any) -> Any:  # noqa: ANN401
            first[:] = first or [model]
            if model == first[0]:
                return call(model, of)
            context = bad(model, of)
            others.update((context, library.llama.get_memory(context) or 0))
            return context

        return init

    def there(spoil: Spoil) -> Spoil:
        def wrap(call: Call, library: Llama) -> Call:
            bad = spoil(call, library)
            return lambda of, *rest: (bad if of in others else call)(of, *rest)

        return wrap

    return {"init_from_model": make, **{n: there(s) for n, s in spoils.items() if n != "init_from_model"}}


def flags(flag: list[bool], spoil: Spoil) -> Spoil:
    """Spoilt from when on something else sets a flag."""

    def wrap(call: Call, library: Llama) -> Call:
        bad = spoil(call, library)
        return lambda *given: bad(*given) if flag else call(*given)

    return wrap


def sets(flag: list[bool]) -> Spoil:
    """Does what it should, and sets a flag."""

    def wrap(call: Call, _: Llama) -> Call:
        def run(*given: Any) -> Any:  # noqa: ANN401
            flag.append(True)
            return call(*given)

        return run

    return wrap
