"""API scenarios for inputs and outputs: embeddings, pooling, samplers on the device."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from gguf import GGUFReader

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
    if left := [line for line in harness.library.log if LEFT in line]:
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
