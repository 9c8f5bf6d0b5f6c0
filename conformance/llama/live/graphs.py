"""Compare llama.cpp's graphs with the builder's node by node, and describe the differences."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from conformance.case.case import Case, Step
from conformance.ggml.tensor import Tensor
from conformance.llama.zoo.family import Request, record_model
from conformance.llama.zoo.model import Value, open_writer, write_tensors
from conformance.suite.decoder import keys_of, trajectory_of, weights
from conformance.suite.decoder.config import Hparams
from conformance.suite.decoder.plan import parse
from conformance.suite.family import read_keys

_COMMON = (
    "run=p250.d8",
    "fa=0,run=p250.d8",
    "ubatch=64,run=p100.p170.d2",
    "seqs=3,run=p5+9+1.d2.rm1.d2.add1.p3.d2",
    "seqs=3,fa=0,run=p5+9+1.d2.rm1.d2",
    "seqs=3,unified=1,run=p5+9+1.d2.rm1.d2.add1.p3.d2",
    "seqs=3,unified=1,fa=0,run=p50+90+10.d3.cp0.d2",
    "run=p40.shift9.d2.reset.p5.d1",
)
"""Prompt and decodes over 256 cells, chunks, one or several streams, sequence changes."""
_QUANTIZED = ("head=64,cache=q8_0,run=p40.d2.shift9.d2",)
_WINDOW = (
    "ctx=1024,ubatch=64,run=p300.d3.p200.d2",
    "ctx=1024,seqs=2,ubatch=64,fa=0,run=p300+17.d3.p200.d2",
    "ctx=1024,seqs=3,unified=1,ubatch=64,run=p200+17+90.d3.p100.d2.rm1.d3.p40",
    "ctx=1024,swafull=1,ubatch=64,run=p200.shift30.d2",
)
"""Sliding windows that wrap around their cells more than once."""
_CONV = (
    "l=3,convperiod=3,heads=2,kv=1,head=32,seqs=4,unified=1,run=p4.d1.rm1.d1.add1.p3.d1.cp2.d2",
    "swa=32,ctx=1024,ubatch=64,run=p300.d2.p200.d2",
)

SETTINGS: dict[str, tuple[str, ...]] = {
    "llama": (*_COMMON, *_QUANTIZED, "freqs=1,tied=1,run=p9.d1", "qkvbias=1,outbias=1,ffnbias=1,run=p9.d1",
              "qkv=fused,fa=0,run=p9.d1", "experts=4,used=2,run=p9.d1"),
    "qwen3": (*_COMMON, *_QUANTIZED),
    "gemma2": (*_COMMON, *_QUANTIZED, *_WINDOW),
    "gpt-oss": (*_COMMON, *_QUANTIZED, *_WINDOW),
    "lfm2": (*_COMMON, *_CONV),
}  # fmt: skip
"""Architecture -> key settings to compare."""

UNSET = frozenset({"inp_mixed_tokens", "inp_mixed_embd", "inp_mixed_slots"})
"""Inputs of the uncomputed branch, which llama.cpp leaves uninitialised."""

_NUMBERED = re.compile(r"(node|leaf)_[0-9]+")


@dataclass(frozen=True, slots=True)
class Moved:
    """A difference between llama.cpp's graph and ours."""

    step: int
    place: int
    """Index of the tensor in llama.cpp's graph, including leaves."""
    what: str

    def __str__(self) -> str:
        return f"step {self.step}, tensor {self.place}: {self.what}"


def check(arch: str, keys_text: str) -> tuple[str, dict[str, Any]]:
    """Return the id of a setting and the values of its keys; UsageError for invalid ones."""
    case_id = f"layout/{arch}-{keys_text}@0"
    values, _ = read_keys(case_id, keys_text, keys_of(arch))
    parse(values["run"])
    return case_id, values


def pair(arch: str, keys_text: str, lib: str = "") -> tuple[Case, Case]:
    """Run a plan over the same weights in llama.cpp and the builder; return its case and ours.

    Raises:
        UsageError: invalid keys, or llama.cpp cannot load the model or run the plan.
        UnavailableError: there is no llama.cpp.
    """
    case_id, values = check(arch, keys_text)
    ours = trajectory_of(case_id, arch, values)
    with tempfile.TemporaryDirectory(prefix="conformance-layout-") as folder:
        model = Path(folder, "model.gguf")
        writer = open_writer(model, arch, metadata(arch, ours.h))
        write_tensors(writer, ours.weights.values(), lambda t: weights.weight(ours.id, ours.h, t))
        request = Request(
            id=case_id, stream=case_id, model=str(model), lib=lib, plan=values["run"], n_ctx=ours.c.n_ctx,
            n_seq_max=ours.c.n_seq_max, n_ubatch=ours.c.n_ubatch, unified=ours.c.kv_unified,
            flash_attn=ours.c.flash_attn, type_k=ours.c.type_k.name, type_v=ours.c.type_v.name,
            swa_full=ours.c.swa_full,
        )  # fmt: skip
        theirs = record_model(request)
    ours.run(values["run"])
    return theirs, ours.case("layout", {}, 0)


def metadata(arch: str, h: Hparams) -> dict[str, Value]:
    """Return the GGUF keys with which llama.cpp builds this model."""
    recr = [h.is_recr(il) for il in range(h.n_layer)]
    kv: Value = [0 if r else h.n_head_kv for r in recr] if any(recr) else h.n_head_kv
    values: dict[str, Value] = {
        "vocab_size": h.n_vocab,
        "context_length": h.n_ctx_orig,
        "embedding_length": h.n_embd,
        "block_count": h.n_layer,
        "feed_forward_length": h.n_ff,
        "attention.head_count": h.n_head,
        "attention.head_count_kv": kv,
        "attention.key_length": h.n_embd_head,
        "attention.value_length": h.head_v,
        "attention.layer_norm_rms_epsilon": h.eps,
        "rope.freq_base": h.freq_base,
    }
    optional: dict[str, tuple[bool, Value]] = {
        "attention.sliding_window": (h.n_swa > 0, h.n_swa),
        "attention.sliding_window_pattern": (h.n_swa > 0, h.swa_period),
        "rope.freq_base_swa": (h.freq_base_swa > 0, h.freq_base_swa),
        "attn_logit_softcapping": (h.attn_softcap > 0, h.attn_softcap),
        "final_logit_softcapping": (h.final_softcap > 0, h.final_softcap),
        "expert_count": (h.n_expert > 0, h.n_expert),
        "expert_used_count": (h.n_expert > 0, h.n_expert_used),
        "expert_feed_forward_length": (h.n_expert > 0, h.n_ff),
        "shortconv.l_cache": (h.n_shortconv > 0, h.n_shortconv),
    }
    values |= {key: value for key, (there, value) in optional.items() if there}
    return {"tokenizer.ggml.model": "none", **{f"{arch}.{key}": value for key, value in values.items()}}


def moved(theirs: Case, ours: Case) -> Iterator[Moved]:
    """Yield the differences in order: tensors that only one graph has, and changed ones."""
    for k, (want, got) in enumerate(zip_longest(theirs.steps, ours.steps)):
        if want is None or got is None:
            yield Moved(k, 0, f"llama.cpp computes {len(theirs.steps)} graphs, the builder {len(ours.steps)}")
            return
        yield from sorted(_moved(k, want, got), key=lambda m: m.place)


def _moved(k: int, want: Step, got: Step) -> Iterator[Moved]:
    a, b = want.graph.tensors(), got.graph.tensors()
    # an extra node renumbers all later unnamed ones: not worth a line each
    a_keys, b_keys = ([(t.op, _NUMBERED.sub(r"\1", t.name)) for t in ts] for ts in (a, b))
    partner: dict[Tensor, Tensor] = {}
    for verdict, i0, i1, j0, j1 in SequenceMatcher(None, a_keys, b_keys, autojunk=False).get_opcodes():
        if verdict == "equal":
            partner |= zip(a[i0:i1], b[j0:j1], strict=True)
            continue
        where = f"after {a[i0 - 1]}" if i0 else "first"
        yield Moved(k, i0, f"{where}, llama.cpp has {_list(a[i0:i1])}, the builder {_list(b[j0:j1])}")
    numbered = len(a) == len(b) == len(partner)
    for i, t in enumerate(a):
        if t in partner:
            differ = [f"name {t.name}, the builder {partner[t].name}"] if numbered and t.name != partner[t].name else []
            differ += [f"{what} {x}, the builder {y}" for what, x, y in _fields(t, partner[t], partner) if x != y]
            if t in want.inputs and t.name not in UNSET:
                same = np.array_equal(want.inputs[t], got.inputs[partner[t]])
                differ += [] if same else ["other bytes in it"]
            if differ:
                yield Moved(k, i, f"{t}: llama.cpp has {'; '.join(differ)}")


def _fields(a: Tensor, b: Tensor, partner: Mapping[Tensor, Tensor]) -> Iterator[tuple[str, object, object]]:
    """Yield field name, llama.cpp's value and ours; tensors by name."""
    yield "type", str(a.type), str(b.type)
    for what in ("ne", "nb", "op_params", "flags", "view_offs"):
        yield what, getattr(a, what), getattr(b, what)
    for i, (x, y) in enumerate(zip_longest(a.src, b.src)):
        yield f"src[{i}]", *_pair(x, y, partner)
    yield "view_src", *_pair(a.view_src, b.view_src, partner)


def _pair(x: Tensor | None, y: Tensor | None, partner: Mapping[Tensor, Tensor]) -> tuple[str, str]:
    if (x is None and y is None) or (x is not None and partner.get(x) is y):
        return "", ""
    return f"{x} (there)", f"{y} (here)"


def _list(tensors: list[Tensor]) -> str:
    return ", ".join(map(str, tensors)) or "nothing"
