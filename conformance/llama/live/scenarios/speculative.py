"""API scenarios for drafts by a second context, another model or MTP layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
from gguf import GGUFReader

from conformance.case.recipe import make
from conformance.case.streams import Stream
from conformance.ggml.errors import UsageError
from conformance.ggml.lib.layout import Embedding
from conformance.ggml.tensor import Bytes, Tensor
from conformance.llama.live.comparison import Comparison
from conformance.llama.zoo.load import RefusedError
from conformance.llama.zoo.model import recipe

from .harness import AFTER, F32, PROMPT, Context, Harness, Tokens, joined
from .states import load, save

DRAFTS = 4
"""Drafts per round."""
ACCEPTED = (4, 0, 2, 1, 3)
"""Accepted drafts of each round."""
MTP, DECODE = 1, 1
"""`LLAMA_CONTEXT_TYPE_MTP`, `LLAMA_PROCESS_TYPE_DECODE`."""
_REWINDS: Mapping[str, object] = {"n_rs_seq": DRAFTS + 1}
"""For recurrent states, which a memory takes back by snapshots alone."""
LAYERS = 2
"""Layers of a model in which an MTP layer and another one can have the same weights."""
Rows = tuple[F32, F32]
"""Logits `[n, n_vocab]` and hidden states `[n, n_embd]`."""


def _context(harness: Harness, n_seq_max: int = 1, *, unified: bool | None = None) -> Context:
    more = _REWINDS if harness.kind in ("recurrent", "hybrid") else {}
    return harness.context(n_seq_max, unified=unified, more=more)


def _round(harness: Harness, name: str, accepted: int) -> tuple[Tokens, int]:
    """Return a round's tokens, the last one of the text and drafts, and how many stay."""
    right = harness.tokens(accepted + 1, f"{name}, right")
    return np.concatenate([right, harness.tokens(DRAFTS - accepted, f"{name}, wrong")]), accepted + 1


def _single(context: Context, tokens: Tokens, seq: int = 0) -> F32:
    return joined(*(context.feed((seq, tokens[k : k + 1])) for k in range(len(tokens))))


def _fed(harness: Harness, text: Tokens) -> Context:
    context = harness.context()
    context.feed((0, text))
    return context


def _take_back(context: Context, seq: int, position: int) -> None:
    if context.next[seq] > position:
        context.rm(seq, position, may_refuse=context.kind in ("recurrent", "hybrid"))


def redrawn(harness: Harness) -> Harness:
    """Load a model of the same architecture with other weights."""

    def data(t: Tensor, _: Bytes) -> Bytes:
        return make(recipe(f"{harness.request.stream} draft", t), t)

    return harness.another(harness.rewrite("draft", data))


def drafted(harness: Harness, *, model: bool) -> Iterator[Comparison]:
    """Draft in another context, verify in a batch, and take rejected drafts back in both.

    `model`: the drafts come from another model.
    """
    of = redrawn(harness) if model else harness
    target, drafter = _context(harness), _context(of)
    control, control_drafter = harness.context(), of.context()
    prompt = harness.tokens(PROMPT)
    for each in (target, drafter, control, control_drafter):
        each.feed((0, prompt))
    for i, accepted in enumerate(ACCEPTED):
        text, stay = _round(harness, f"round {i}", accepted)
        drafts = _single(drafter, text[:DRAFTS])
        verified = target.feed((0, text), every=True)
        found = _single(control, text[:stay]), _single(control_drafter, text[:stay])
        yield Comparison(f"verified in round {i}", verified[:stay], found[0])
        yield Comparison(f"drafted in round {i}", drafts[:stay], found[1][: len(drafts)])
        _take_back(target, 0, control.next[0])
        _take_back(drafter, 0, control.next[0])
        if stay > DRAFTS:  # the last draft was not read by its own context
            drafter.feed((0, text[DRAFTS:stay]))
    expected = control.steps(), control_drafter.steps()
    yield Comparison("after the rounds", target.steps(), expected[0])
    yield Comparison("the drafts after them", drafter.steps(), expected[1])
    if model:
        yield Comparison("the two models", expected[1], expected[0], differs=True)
    yield Comparison("without the rounds", _fed(harness, prompt).steps(), expected[0], differs=True)


def several(harness: Harness, *, unified: bool) -> Iterator[Comparison]:
    """Verify drafts of two sequences in one batch, and reject another number in each."""
    target = _context(harness, 2, unified=unified)
    control = [harness.context(), harness.context()]
    prompts = [harness.tokens(PROMPT + 4 * seq, f"prompt {seq}") for seq in range(2)]
    target.feed(*enumerate(prompts))
    for seq in range(2):
        control[seq].feed((0, prompts[seq]))
    n = DRAFTS + 1
    for i, accepted in enumerate(ACCEPTED):
        stays = accepted, ACCEPTED[i - 1]
        rounds = [_round(harness, f"round {i} of {seq}", stays[seq]) for seq in range(2)]
        verified = target.feed(*((seq, text) for seq, (text, _) in enumerate(rounds)), every=True)
        for seq, (text, stay) in enumerate(rounds):
            single = _single(control[seq], text[:stay])
            yield Comparison(f"round {i}, sequence {seq}", verified[seq * n : seq * n + stay], single)
            _take_back(target, seq, control[seq].next[0])
    expected = [context.steps() for context in control]
    for seq in range(2):
        yield Comparison(f"sequence {seq} after the rounds", target.steps(seq), expected[seq])
    yield Comparison("the two sequences", expected[1], expected[0], differs=True)


# --- MTP: layers after the last one, which read its hidden states


class Head(Context):
    """A context that runs the model's MTP layers."""

    def follow(self, *spans: tuple[int, Tokens, F32]) -> Rows:
        """Decode tokens of sequences in one batch, each with the hidden state before it.

        Returns the logits and hidden states of each token.

        Raises:
            UsageError: llama.cpp returned an error.
        """
        call, n_embd = self.harness.call, self.harness.n_embd
        batch = call("batch_ext_init")(self.pointer)
        try:
            for seq, tokens, states in spans:
                rows = np.ascontiguousarray(states, np.float32)
                for token, row in zip(tokens, rows, strict=True):
                    i = call("batch_ext_add_token")(batch, seq, int(token))
                    at = np.array([self.next[seq]], np.int32)
                    state = Embedding(row.ctypes.data, 1, n_embd)
                    if not (
                        call("batch_ext_set_pos")(batch, i, at.ctypes.data)
                        and call("batch_ext_set_embd_state")(batch, i, state)
                        and call("batch_ext_set_output_logits")(batch, i, True)  # C's signature
                    ):
                        raise UsageError(f"llama_batch_ext refuses token {i} with a hidden state")
                    self.next[seq] += 1
            status = call("process")(self.pointer, DECODE, batch)
        finally:
            call("batch_ext_free")(batch)
        n = sum(len(tokens) for _, tokens, _ in spans)
        if status:
            raise UsageError(f"llama_process of {n} tokens returned {status}: {self.harness.library.reason()}")
        return self.results("get_logits_ith", range(n), self.harness.n_vocab), hidden(self, n)

    def drafts(self, tokens: Tokens, state: F32, seq: int = 0) -> Rows:
        """Decode tokens one by one, each with the hidden state that the last one gave here."""
        logits, states = [], [state]
        for k in range(len(tokens)):
            found = self.follow((seq, tokens[k : k + 1], states[-1]))
            logits.append(found[0])
            states.append(found[1])
        return joined(*logits), joined(*states[1:])


def hidden(context: Context, n: int) -> F32:
    """Return the hidden states of the `n` tokens of the last batch."""
    return context.results("get_embeddings_nextn_ith", range(n), context.harness.n_embd)


def _need_layers(harness: Harness) -> int:
    """Return the number of MTP layers; RefusedError if the model has none."""
    n = int(harness.call("model_n_layer_nextn")(harness.model))
    if not n:
        raise RefusedError("the model has no MTP layers")
    return n


def _shows(context: Context, *, masked: bool) -> Context:
    """Enable the output of hidden states: of all tokens, or (masked) of those with logits."""
    context.harness.call("set_embeddings_nextn")(context.pointer, True, masked)
    return context


def target_of(harness: Harness, n_seq_max: int = 1, *, rewinds: bool = False) -> Context:
    """Make a context of the model's other layers, whose hidden states can be read."""
    return _shows(_context(harness, n_seq_max) if rewinds else harness.context(n_seq_max), masked=False)


def head_of(harness: Harness, n_seq_max: int = 1, layer: int = 0) -> Head:
    """Make a context of one MTP layer; RefusedError if the model has none."""
    _need_layers(harness)
    made = harness.context(n_seq_max, more={"ctx_type": MTP})
    head = Head(_attends(harness), made.pointer, made.request)
    if layer:
        harness.call("set_nextn_layer_offset")(head.pointer, layer)
    _shows(head, masked=True)
    return head


def _attends(harness: Harness) -> Harness:
    """Return the harness of a context that has a KV cache only, whatever the other layers have."""
    of = replace(harness)
    of.__dict__["kind"] = "attention"
    return of


def previous_states(states: F32, first: F32 | None = None) -> F32:
    """Return the hidden state before each token; `first` is 0 at a sequence's begin."""
    return np.concatenate([np.zeros_like(states[:1]) if first is None else first, states[:-1]])


def _text(harness: Harness, n: int, name: str = "prompt") -> tuple[Tokens, F32]:
    """Return a text and the hidden states of its tokens, from one batch."""
    text = harness.tokens(n, name)
    target = target_of(harness)
    target.feed((0, text), every=True)
    return text, hidden(target, n)


def layer(harness: Harness) -> Iterator[Comparison]:
    """Compare an MTP layer with layer 0, which has the same weights and reads the same rows."""
    _need_layers(harness)
    eps, weights, twin = _twin(harness)
    text = harness.tokens(PROMPT)
    states = Stream(harness.request.stream, "hidden states").normal(PROMPT * harness.n_embd, 1.0).astype(np.float32)
    states = states.reshape(PROMPT, -1)

    def normed(rows: F32, name: str) -> F32:
        rms = np.sqrt(np.mean(rows.astype(np.float64) ** 2, 1, keepdims=True) + eps)
        return np.asarray(rows / rms * weights[name], np.float32)

    joint = np.concatenate([normed(weights["token_embd.weight"][text], "enorm"), normed(states, "hnorm")], 1)
    rows = (joint.astype(np.float64) @ weights["eh_proj"].T.astype(np.float64)).astype(np.float32)
    found = head_of(twin).follow((0, text, states))[0]
    expected = twin.context().feed((0, rows), every=True)
    yield Comparison("the MTP layer", found, expected)
    other = head_of(twin).follow((0, text, states[::-1]))[0]
    yield Comparison("other hidden states", other, found, differs=True)


def _twin(harness: Harness) -> tuple[float, dict[str, F32], Harness]:
    """Load a model whose only MTP layer has the weights of layer 0, its only other layer.

    Returns the epsilon of its norms, weights `token_embd.weight`, `enorm`, `hnorm` and `eh_proj`, and its harness.
    RefusedError if the layers have not the same weights, or these four are not F32.
    """
    reader = GGUFReader(harness.request.model)
    of = {t.name: t for t in reader.tensors}
    names = {n for n in of if n.startswith("blk.1.") and ".nextn." not in n}
    same = {n: n.replace("blk.1.", "blk.0.") for n in names}
    kinds = {name: (t.tensor_type, tuple(t.shape)) for name, t in of.items()}
    equal = {kinds.get(a) == kinds.get(b) for a, b in same.items()}
    layers = {n for n in of if n.startswith("blk.") and ".nextn." not in n}
    keys = harness.request.provenance["keys"].values()
    if (
        equal != {True}
        or layers != {*same, *same.values()}
        or any(isinstance(v, list) and len(v) == LAYERS and v[0] != v[1] for v in keys)
    ):
        raise RefusedError("the MTP layer is not like the model's only other layer")

    def data(t: Tensor, held: Bytes) -> Bytes | None:
        if t.name in same:
            return np.ascontiguousarray(of[same[t.name]].data).view(np.uint8).reshape(-1)
        own = ("nextn.embed_tokens", "nextn.shared_head")  # without them it uses the model's
        return None if any(part in t.name for part in own) else held

    twin = harness.another(harness.rewrite("twin", data))
    wanted = {"token_embd.weight": "token_embd.weight"}
    wanted |= {name: f"blk.1.nextn.{name}.weight" for name in ("enorm", "hnorm", "eh_proj")}
    weights = {name: np.array(of[full].data) for name, full in wanted.items()}
    if any(w.dtype != np.float32 for w in weights.values()):
        raise RefusedError("the weights before the MTP layer are not F32")
    eps = next(f for name, f in reader.fields.items() if name.endswith("attention.layer_norm_rms_epsilon"))
    return float(eps.contents()), weights, twin


def batch(harness: Harness) -> Iterator[Comparison]:
    """Compare the MTP layer on a text in one batch, in two, and token by token."""
    text, states = _text(harness, PROMPT)
    given = previous_states(states)
    whole = head_of(harness).follow((0, text, given))
    head = head_of(harness)
    halves = [head.follow((0, text[a:b], given[a:b])) for a, b in ((0, 8), (8, PROMPT))]
    one = head_of(harness)
    single = [one.follow((0, text[k : k + 1], given[k : k + 1])) for k in range(PROMPT)]
    for what, parts in (("two batches", halves), ("token by token", single)):
        for kind, i in (("logits", 0), ("hidden states", 1)):
            yield Comparison(f"{what}, {kind}", joined(*(part[i] for part in parts)), whole[i])
    none = head_of(harness).follow((0, text, np.zeros_like(given)))[0]
    yield Comparison("without hidden states", none, whole[0], differs=True)


def rows(harness: Harness) -> Iterator[Comparison]:
    """Compare hidden states of all tokens and of a few; neither changes the logits."""
    _need_layers(harness)
    text = harness.tokens(PROMPT)
    spans = [(0, text[:4]), (0, text[4:9]), (0, text[9:])]
    at = [3, 8, PROMPT - 1]
    logits = harness.context().feed(*spans)
    every, few = target_of(harness), _shows(harness.context(), masked=True)
    yield Comparison("logits beside all hidden states", every.feed(*spans), logits)
    yield Comparison("logits beside some", few.feed(*spans), logits)
    some = few.results("get_embeddings_nextn_ith", at, harness.n_embd)
    rows_of_all = hidden(every, PROMPT)
    yield Comparison("the hidden states", some, rows_of_all[at])
    yield Comparison("those of other tokens", rows_of_all[[k - 1 for k in at]], some, differs=True)


def sequences(harness: Harness) -> Iterator[Comparison]:
    """Compare hidden states and MTP layers of two sequences in a batch with each alone."""
    _need_layers(harness)
    texts = [_text(harness, PROMPT + 4 * seq, f"prompt {seq}") for seq in range(2)]
    target, head = target_of(harness, 2), head_of(harness, 2)
    target.feed(*((seq, text) for seq, (text, _) in enumerate(texts)), every=True)
    ends = np.cumsum([len(text) for text, _ in texts])
    found = np.split(hidden(target, int(ends[-1])), ends[:-1])
    both = head.follow(*((seq, text, previous_states(states)) for seq, (text, states) in enumerate(texts)))
    drafts: list[F32] = []
    for seq, (text, states) in enumerate(texts):
        yield Comparison(f"hidden states of sequence {seq}", found[seq], states)
        alone = head_of(harness)
        expected = alone.follow((0, text, previous_states(states)))[0]
        yield Comparison(f"sequence {seq}", np.split(both[0], ends[:-1])[seq], expected)
        steps = harness.tokens(AFTER, "after")
        drafts.append(alone.drafts(steps, states[-1:])[0])
        yield Comparison(f"drafts of sequence {seq}", head.drafts(steps, states[-1:], seq)[0], drafts[-1])
    yield Comparison("the two sequences", drafts[1], drafts[0], differs=True)


def rounds(harness: Harness) -> Iterator[Comparison]:
    """Draft with the MTP layer, verify in a batch, and take rejected drafts back."""
    _need_layers(harness)
    target, head = target_of(harness, rewinds=True), head_of(harness)
    control = target_of(harness)
    history = harness.tokens(PROMPT)
    target.feed((0, history), every=True)
    control.feed((0, history), every=True)
    states, control_states = hidden(target, PROMPT), hidden(control, PROMPT)
    head.follow((0, history, previous_states(states)))
    for i, accepted in enumerate(ACCEPTED):
        text, stay = _round(harness, f"round {i}", accepted)
        begin, pending = target.next[0], states[-1:]
        drafts = head.drafts(text[:DRAFTS], pending)
        fresh = head_of(harness)
        fresh.follow((0, history, previous_states(control_states)))
        expected = fresh.drafts(text[:DRAFTS], control_states[-1:])
        yield Comparison(f"drafts of round {i}", drafts[0], expected[0])
        yield Comparison(f"hidden states of round {i}", drafts[1], expected[1])
        verified = target.feed((0, text), every=True)
        states = hidden(target, len(text))[:stay]
        logits, single = [], []
        for k in range(stay):
            logits.append(control.feed((0, text[k : k + 1])))
            single.append(hidden(control, 1))
        yield Comparison(f"verified in round {i}", verified[:stay], joined(*logits))
        history, control_states = np.concatenate([history, text[:stay]]), joined(control_states, *single)
        _take_back(target, 0, control.next[0])
        head.rm(0, begin)
        head.follow((0, text[:stay], previous_states(states, pending)))
    expected_steps = control.steps()
    yield Comparison("after the rounds", target.steps(), expected_steps)
    without = _fed(harness, harness.tokens(PROMPT))
    yield Comparison("without the rounds", without.steps(), expected_steps, differs=True)


def state(harness: Harness) -> Iterator[Comparison]:
    """Save the state of an MTP context and load it into a new one."""
    text, states = _text(harness, PROMPT)
    head, into = head_of(harness), head_of(harness)
    head.follow((0, text, previous_states(states)))
    load(into, save(head))
    steps = harness.tokens(AFTER, "after")
    expected = head.drafts(steps, states[-1:])[0]
    yield Comparison("in a new context", into.drafts(steps, states[-1:])[0], expected)
    yield Comparison("without the text", head_of(harness).drafts(steps, states[-1:])[0], expected, differs=True)


def heads(harness: Harness) -> Iterator[Comparison]:
    """Switch between MTP layers in one context, and compare with a context for each."""
    if _need_layers(harness) == 1:
        raise RefusedError("the model has one MTP layer only")
    text, states = _text(harness, PROMPT)
    given = previous_states(states)
    head, found = head_of(harness), []
    for i in (0, 1, 0):
        harness.call("set_nextn_layer_offset")(head.pointer, i)
        head.rm(0, 0)
        found.append(head.follow((0, text, given))[0])
    for k, i in enumerate((0, 1, 0)):
        expected = head_of(harness, layer=i).follow((0, text, given))[0]
        yield Comparison(f"layer {i} as number {k}", found[k], expected)
    yield Comparison("the two layers", found[1], found[0], differs=True)
