"""API scenarios for inputs and outputs: embeddings, pooling, samplers on the device."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from gguf import GGUFReader
from numpy.typing import NDArray

from conformance.ggml.errors import UsageError
from conformance.llama.live.comparison import Comparison
from conformance.llama.zoo.load import RefusedError

from .harness import AFTER, F32, PROMPT, Harness

OTHERWISE = {
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3n", "gemma4"), "scales embeddings of tokens alone"),
    "cogvlm": "takes embeddings for an image",
}
"""Architecture -> why external embeddings are not treated like those of tokens."""
MEAN, CLS, LAST, NONE = 1, 2, 3, 0
"""`enum llama_pooling_type`."""
POOLINGS = {"mean": MEAN, "cls": CLS, "last": LAST}
"""Name in scenarios -> kind."""


def embeddings_in(harness: Harness) -> Iterator[Comparison]:
    """Feed embeddings instead of tokens; RefusedError if llama.cpp treats them differently."""
    arch = str(harness.request.params.get("arch"))
    if arch in OTHERWISE:
        raise RefusedError(f"{arch} {OTHERWISE[arch]}")
    table = next((t for t in GGUFReader(harness.request.model).tensors if t.name == "token_embd.weight"), None)
    if table is None or table.data.dtype != np.float32:
        raise RefusedError("the model's file holds no token embedding in F32")
    text = harness.tokens(PROMPT)
    rows: F32 = np.array(table.data)[text]
    context, control = harness.context(), harness.context()
    yield Comparison("the prompt", context.feed((0, rows)), control.feed((0, text)))
    yield Comparison("steps after it", context.steps(), control.steps())


def every(harness: Harness) -> Iterator[Comparison]:
    """Compare the results of all tokens with those of the last, and of a few."""
    text = harness.tokens(PROMPT)
    all_of = harness.context().feed((0, text), every=True)
    yield Comparison("the last token", harness.context().feed((0, text)), all_of[-1:])
    yield Comparison("the last of 4", harness.context().feed((0, text[:4])), all_of[3:4])
    few = harness.context().feed((0, text[:4]), (0, text[4:9]), (0, text[9:]))
    yield Comparison("three tokens", few, all_of[[3, 8, PROMPT - 1]])


def asked(harness: Harness) -> Iterator[Comparison]:
    """Enable and disable embeddings."""
    context, control, text = harness.context(), harness.context(), harness.tokens(PROMPT)
    harness.call("set_embeddings")(context.pointer, True)  # C's signature
    context.decode((0, text))
    harness.call("set_embeddings")(context.pointer, False)
    context.clear()
    yield Comparison("the prompt", context.feed((0, text)), control.feed((0, text)))
    yield Comparison("steps after it", context.steps(), control.steps())


def pooling(harness: Harness, pooling_type: int, *, unified: bool | None = None) -> Iterator[Comparison]:
    """Compare pooled results of two sequences with the same pooling computed on the host."""
    if harness.kind == "encoder" and not harness.request.embeddings:
        raise RefusedError("this model gives logits, not embeddings")
    spans = [(seq, harness.tokens(7 + 4 * seq, f"prompt {seq}")) for seq in range(2)]
    pooled = harness.context(2, unified=unified, embeddings=True, more={"pooling_type": pooling_type}).feed(*spans)
    rows = harness.context(2, embeddings=True, more={"pooling_type": NONE}).feed(*spans, every=True)
    of = [rows[:7], rows[7:]]
    by = {MEAN: lambda r: r.mean(0), CLS: lambda r: r[0], LAST: lambda r: r[-1]}
    yield Comparison("both sequences", pooled, np.stack([by[pooling_type](r) for r in of]).astype(np.float32))


LEFT = "needed for sampler"
"""Part of llama.cpp's log line if the device lacks an op of a sampler."""


def greedy(harness: Harness) -> Iterator[Comparison]:
    """Compare a greedy sampler on the device with the argmax of another context's logits."""
    call = harness.call
    chain = call("sampler_chain_init")(call("sampler_chain_default_params")())
    call("sampler_chain_add")(chain, call("sampler_init_greedy")())
    context, control = harness.context(), harness.context()
    if not call("set_sampler")(context.pointer, 0, chain):
        raise RefusedError("llama_set_sampler returned false")
    if left := [line for line in harness.library.log.lines if LEFT in line]:
        raise RefusedError(left[-1])
    token = harness.tokens(PROMPT)
    found, expected = [], []
    for _ in range(AFTER + 1):
        n = len(token)
        context.decode((0, token))
        found.append(call("get_sampled_token_ith")(context.pointer, n - 1))
        logits = control.feed((0, token))[0]
        expected.append(int(logits.argmax()))
        if found[-1] < 0:
            raise UsageError("llama_get_sampled_token_ith gave no token, though a sampler is set")
        token = np.array([expected[-1]])
    rows = [np.eye(harness.n_vocab, dtype=np.float32)[tokens] for tokens in (found, expected)]
    yield Comparison("the tokens", rows[0], rows[1], exact=True)


class TokenDataArray(ctypes.Structure):
    """`llama_token_data_array`."""

    _fields_ = (("data", ctypes.c_void_p), ("size", ctypes.c_size_t), ("selected", ctypes.c_int64),
                ("sorted", ctypes.c_bool))  # fmt: skip


Samplers = tuple[tuple[str, tuple[float, ...]], ...]
CHAINS: Mapping[str, Samplers] = {
    "bias": (("logit_bias", (3, 5.0, 7, -4.0)),),
    "temp": (("temp", (0.5,)),),
    "top_k": (("top_k", (5,)),),
    "top_p": (("top_p", (0.8, 1)),),
    "min_p": (("min_p", (0.1, 1)),),
    "bias, top_k, top_p, temp": (
        ("logit_bias", (3, 5.0, 7, -4.0)), ("top_k", (40,)), ("top_p", (0.9, 1)), ("temp", (0.7,)),
    ),
    "temp, min_p, top_k": (("temp", (1.5,)), ("min_p", (0.02, 1)), ("top_k", (9,))),
}  # fmt: skip
"""Chain -> its samplers with the arguments of `llama_sampler_init_*`.

A bias has tokens and values in turns."""


def chains(harness: Harness) -> Iterator[Comparison]:
    """Compare chains of samplers on the device with the host's, on another context's logits.

    A device samples with the first samplers of a chain, up to one that it does not support; the host applies the rest,
    as `llama_sampler_sample` does.
    """
    control, text = harness.context(), harness.tokens(PROMPT)
    logits = control.feed((0, text))[0]
    refused = []
    for name, samplers in CHAINS.items():
        context, chain = harness.context(), _chain(harness, samplers)
        if not harness.call("set_sampler")(context.pointer, 0, chain):
            refused.append(name)
            continue
        context.decode((0, text))
        at, ids, values = PROMPT - 1, np.arange(harness.n_vocab), np.zeros(0, np.float32)
        if n := harness.call("get_sampled_candidates_count_ith")(context.pointer, at):
            pointer = harness.call("get_sampled_candidates_ith")(context.pointer, at)
            ids = np.frombuffer(ctypes.string_at(pointer, 4 * n), np.int32)
        n = harness.call("get_sampled_logits_count_ith")(context.pointer, at)
        if n != ids.size:
            raise UsageError(f"{name}: {n} sampled logits for {ids.size} candidates")
        values = context.results("get_sampled_logits_ith", [at], n)[0]
        found = _applied(harness, chain, ids, values)
        expected = _applied(harness, _chain(harness, samplers), np.arange(logits.size), logits)
        yield Comparison(name, _row(harness, *found)[None], _row(harness, *expected)[None])
    if len(refused) == len(CHAINS):
        raise RefusedError("llama_set_sampler returned false for every chain")


def _chain(harness: Harness, samplers: Samplers) -> int:
    """Make a chain, which llama.cpp never frees here: a context may hold it."""
    call = harness.call
    chain = int(call("sampler_chain_init")(call("sampler_chain_default_params")()))
    for name, given in samplers:
        arguments: tuple[Any, ...] = given
        if name == "logit_bias":
            pairs = np.array(list(zip(given[::2], given[1::2], strict=True)), [("token", "<i4"), ("bias", "<f4")])
            arguments = harness.n_vocab, len(pairs), pairs.ctypes.data
        call("sampler_chain_add")(chain, call(f"sampler_init_{name}")(*map(_c, arguments)))
    return chain


def _c(value: float) -> float:
    return int(value) if float(value).is_integer() else value


def _applied(harness: Harness, chain: int, ids: NDArray[Any], logits: F32) -> tuple[NDArray[Any], NDArray[Any]]:
    """Apply the samplers of a chain that no device has applied.

    Returns the tokens that are left, and their logits.
    """
    data = np.zeros(logits.size, [("id", "<i4"), ("logit", "<f4"), ("p", "<f4")])
    data["id"], data["logit"] = ids, logits
    array = TokenDataArray(data.ctypes.data, data.size, -1, sorted=False)
    harness.call("sampler_apply")(chain, ctypes.byref(array))
    left = np.frombuffer(ctypes.string_at(array.data, 12 * array.size), data.dtype)
    return left["id"], left["logit"]


def _row(harness: Harness, ids: NDArray[Any], logits: NDArray[Any]) -> F32:
    """Return the probability of each token, 0 for those that the chain removed.

    NaN if an id is of no token.
    """
    if ((ids < 0) | (ids >= harness.n_vocab)).any():
        return np.full(harness.n_vocab, np.nan, np.float32)
    row = np.zeros(harness.n_vocab, np.float32)
    row[ids] = np.exp(logits - logits.max())
    return np.asarray(row / row.sum(), np.float32)
