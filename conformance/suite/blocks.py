"""The family `blocks`: single sublayers of each architecture, such as attention.

`blocks/llama-fa=0,run=p5.d1,layer=0,block=attention@7`: the id of a decoder, and the block. For an architecture unknown
to the builder it is the id of a recording (family `zoo`; requires llama.cpp). Weights and caches are those of the whole
model; inputs from other layers are random. `block=ffn_up` is the single node that reads this weight, for a device that
only multiplies.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from conformance.case.case import Case, Step
from conformance.case.streams import Stream
from conformance.ggml.errors import UnavailableError, UsageError
from conformance.ggml.graph import Graph
from conformance.ggml.partial import Part, partial
from conformance.ggml.tensor import Bytes, Tensor, nelements
from conformance.ggml.types import F32

from . import FAMILIES
from .data import random_bytes
from .decoder import make, split_arch
from .family import LEVELS, Family, Level, Table, ids_of, keys, read_keys, split_id, text, with_seed, without
from .grid import Grid, Keys, grid, points

NAME = "blocks"
ZOO = "zoo"
"""The family that records the models that the builder does not know."""
KEYS = {**keys("layer=0"), "block": text("attention", "a block's name")}
"""Keys of the block."""

_TINY: Keys = {"l": 2, "embd": 32, "heads": 4, "kv": 2, "head": 16, "ff": 32, "vocab": 32, "seqs": 2, "ctx": 256}
_LONG: Keys = {"l": 1, "embd": 2048, "heads": 4, "kv": 2, "head": 16, "ff": 32, "vocab": 32, "ctx": 256, "w": "f16"}
"""Rows long enough for accelerators, everything else small."""
_RUN: Keys = {"run": "at20.p3.d1"}
_POSITIONS = "freqs=1 base=500000 rope=neox rope=none,alibi=8 qkv=fused outbias=1"
_TWO: Keys = {"seqs": 2, "nodes": 2, "run": "p3.d1"}
"""Inputs that cannot be random, such as a mask, are recorded in both steps."""

TABLE: Table = {
    "smoke": (
        grid("llama", **_TINY, **_RUN, block="ffn_norm feedforward attention head"),
        grid("llama", **_TINY, fa=0, freqs=1, base=500000, **_RUN, block="attention"),
        grid("llama", **_TINY, norm="layer", **_RUN, block="ffn_norm"),
        grid("llama", **_TINY, softcap=3, **_RUN, block="attention"),
        grid("gpt-oss", **_TINY, **_RUN, block="attention feedforward"),
        grid("lfm2", **_TINY, run="p3.d1", block="recurrent"),
        grid("llama", **_LONG, **_RUN, block="attention feedforward"),
        grid("llama", **_LONG, **_RUN, block="attn_q ffn_up"),
    ),
    "standard": (
        grid("gemma2", **_TINY, fa="1 0", **_RUN, block="attention"),
        grid("llama", **_TINY, variant=points("ffn=geglu ffn=gelu ffnbias=1"), **_RUN, block="feedforward"),
        grid("llama", **_TINY, variant=points(_POSITIONS), **_RUN, block="attention"),
        grid("llama", **_TINY | {"head": 64}, cache="q8_0", rot="0 1", **_RUN, block="attention"),
        grid("llama", **_TINY, experts=4, gating="softmax sigmoid", **_RUN, block="feedforward"),
        grid("llama", **_TINY | {"l": 1}, experts="6 8 576", used="2 4", **_RUN, block="feedforward"),
        grid("qwen3", **_TINY, fa="1 0", **_RUN, block="attention"),
        grid("gemma2", **_TINY, layer="0 1", **_RUN, block="post_attention_norm attention feedforward"),
        grid("gemma2", **_TINY, **_RUN, block="head"),
        grid("gpt-oss", **_TINY, fa=0, layer="0 1", **_RUN, block="attention"),
        grid("lfm2", **_TINY, run="p3.d1", layer=1, block="attn_norm attention feedforward"),
        grid("llama", **_LONG | {"w": "q4_0 q8_0 bf16"}, run="p70.p17.d1", block="attn_v ffn_gate"),
    ),
    "full": (grid("llama", **_TINY, w="q4_0 q8_0 f16", **_RUN, block="feedforward attention head"),),
}
"""Architectures known to the builder."""


def _recorded(blocks: str) -> tuple[Grid, ...]:
    """Return rows for `ARCH:BLOCK|BLOCK`, or `ARCH/LAYER:BLOCK|BLOCK` for another layer than 0."""
    items = (item.partition(":") for item in blocks.split())
    rows = ((*where.partition("/"), names.replace("|", " ")) for where, _, names in items)
    return tuple(grid(arch, **_TWO, layer=layer or "-", block=names) for arch, _, layer, names in rows)


RECORDED: Table = {
    "smoke": (*_recorded("mamba:recurrent"), grid("gptneox", **_TWO, set="rope.dimension_count:64", block="attention")),
    "standard": _recorded(
        "modern-bert:attention|feedforward bert:attention|feedforward bloom:attention dbrx:attention|feedforward "
        "mpt:attention|feedforward qwen2moe:feedforward t5:attention|feedforward gptneox:attention "
        "hunyuan-moe:feedforward bitnet:attention|feedforward falcon:attention granite:attention|feedforward "
        "llama4:attention phi2:attention|feedforward jina-bert-v2:attention|feedforward olmo2:attention "
        "stablelm:attention command-r:attention gemma3:attention minicpm3:attention|feedforward "
        "olmo:attention|feedforward deepseek2:attention grok:attention|feedforward cohere2:attention mamba:recurrent "
        "mamba2:recurrent plamo2:attention plamo2/1:recurrent qwen3next:attention kimi-linear:attention "
        "kimi-linear/1:attention falcon-h1:attention|feedforward rwkv7:feedforward|recurrent rwkv7/1:recurrent "
        "rwkv6:recurrent rwkv6/1:recurrent"
    ),
    "full": _recorded(
        "chatglm:feedforward exaone4:post_attention_norm qwen2:head wavtokenizer-dec:head jais2:feedforward "
        "neo-bert/1:feedforward phimoe:ffn_norm|head deci:feedforward llama-embed:feedforward "
        "nomic-bert-moe/1:feedforward bailingmoe:feedforward cogvlm:attention bert:attn_output_norm bloom:head "
        "dbrx:head dream:attention mimo2:attention|feedforward qwen:attention t5:attn_norm|ffn_norm t5/1:feedforward "
        "t5encoder:attention t5encoder/1:feedforward jina-bert-v3:attention ernie4_5-moe/1:feedforward lfm2moe:head "
        "lfm2moe/1:feedforward|recurrent plamo3:attention bailingmoe2:attention bailingmoe2/1:feedforward "
        "openelm:attention baichuan:attention llada-moe:attention|feedforward gemma-embedding:attention "
        "nemotron_h:attention nemotron_h/2:feedforward arcee:attention|feedforward codeshell:attention|attn_norm "
        "gemma:attention|feedforward gemma4:attention|feedforward|post_ffw_norm gemma4/1:post_ffw_norm granite:head "
        "llama4/1:feedforward llama4/3:attention phi2:head qwen3moe:feedforward dots1:attention exaone-moe:attention "
        "exaone-moe/1:attention hunyuan-dense:attention minimax-m2:attention apertus:attention|feedforward "
        "minicpm3:head nemotron_h_moe/2:feedforward olmo:head plamo:attention chameleon:attention|head "
        "qwen35moe:feedforward afmoe:attention|attn_norm|feedforward|ffn_norm|head afmoe/1:feedforward "
        "deepseek2/1:feedforward cohere2:attn_norm|head cohere2/1:attention|attn_norm step35:attention "
        "grovemoe:feedforward mamba:attn_norm mamba/1:attn_norm "
        "gemma3n:attention|attn_norm|feedforward|head|post_attention_norm|post_ffw_norm gemma3n/1:post_ffw_norm "
        "granitehybrid/1:recurrent smallthinker:attention smallthinker/1:attention jamba/1:attn_norm|recurrent "
        "arctic:attention qwen3next/1:attention qwen35:attention|head|post_attention_norm qwen35/1:attention "
        "glm-dsa:attention|feedforward glm-dsa/1:feedforward kimi-linear/1:attn_norm|feedforward "
        "falcon-h1/1:attention arwkv7:attn_norm|feedforward|ffn_norm|recurrent arwkv7/1:recurrent rwkv7:attn_norm "
        "rwkv7/1:feedforward rwkv6/1:feedforward rwkv6qwen2:recurrent"
    ),
}
"""Recordings, smallest first: one architecture per distinct op sequence."""

_OWNER = re.compile(r"(?:(?:enc|dec)\.)?blk\.(?P<layer>[0-9]+)\.(?P<role>.+?)(?:\.(?:weight|bias|scale))?", re.ASCII)
_CACHE = re.compile(r"cache_(?P<role>[kvrs])_l(?P<layer>[0-9]+)", re.ASCII)
_NORM = re.compile(r"(attn|ffn|post_attention|post_ffw|attn_post|ffn_post|attn_output|layer_output)_norm(_[0-9])?")

_ROLES: dict[str, tuple[str, ...]] = {
    "attention": ("attn_", "cross_attn_", "indexer"),
    "feedforward": ("ffn_", "exp_probs", "channel_mix_"),
    "recurrent": ("ssm_", "time_mix_", "shortconv"),
}
"""Block -> prefixes of its weights' roles; a norm between blocks is named after its role."""
HEAD = "head"
"""Block after all layers, listed as layer 0."""
_HEAD = re.compile(r"(output|cls)(_norm)?\b.*")
_NORM_OPS = frozenset({"NORM", "RMS_NORM"})


@dataclass(frozen=True, slots=True, order=True)
class Block:
    """A sublayer."""

    layer: int
    name: str


def block_of(name: str) -> Block | None:
    """Return the block of a weight or cache; None if it has none, such as an embedding."""
    cache, owner = _CACHE.fullmatch(name), _OWNER.fullmatch(name)
    if cache is not None:
        return Block(int(cache["layer"]), "recurrent" if cache["role"] in "rs" else "attention")
    if owner is None:
        return Block(0, HEAD) if _HEAD.fullmatch(name) else None
    layer, role = int(owner["layer"]), owner["role"]
    if _NORM.fullmatch(role):
        return Block(layer, role)
    return next((Block(layer, b) for b, heads in _ROLES.items() if role.startswith(heads)), None)


def _spans(graph: Graph, persistent: Collection[Tensor]) -> dict[Block, tuple[int, int]]:
    """Return every block of a graph -> index of its first node, and that after its last.

    A block extends from the first to the last node that reads its weights or caches, and on to the next block. The norm
    op before a norm's weight and the preceding residual sum belong to the norm. Blocks with interleaved nodes, such as
    parallel attention and recurrence, are merged and named after the first that is not a norm.
    """
    own = frozenset(persistent)
    spans: dict[Block, tuple[int, int]] = {}
    for i, node in enumerate(graph):
        for s in node.src:
            block = block_of(s.root.name) if s is not None and s.root in own else None
            if block is not None:
                spans[block] = (spans.get(block, (i, i))[0], i + 1)
    merged: list[tuple[Block, int, int]] = []
    for block, (first, last) in sorted(spans.items(), key=lambda item: item[1]):
        if merged and first < merged[-1][2]:
            before, start, end = merged[-1]
            merged[-1] = (block if _is_norm(before) else before, start, max(end, last))
        else:
            merged.append((block, first, last))
    starts = [_start(graph, first) if _is_norm(block) else first for block, first, _ in merged]
    ends = [*starts[1:], len(graph)]
    return {block: (start, end) for (block, _, _), start, end in zip(merged, starts, ends, strict=True)}


def _reader(graph: Graph, block: Block) -> tuple[int, int] | None:
    """Return the index of the first node that reads the weight `block`, and the next; or None."""
    name = f"blk.{block.layer}.{block.name}.weight"
    at = next((i for i, n in enumerate(graph) if any(s is not None and s.name == name for s in n.src)), None)
    return None if at is None else (at, at + 1)


def _states_last(graph: Graph, persistent: Collection[Tensor]) -> Graph:
    """Move nodes that load a recurrent state to just before the first node that needs it.

    llama.cpp puts them where it starts to build a layer, possibly among the nodes of the previous layer.
    """
    own = frozenset(persistent)
    layer: dict[Tensor, int] = {}
    for t in own:
        match = _CACHE.fullmatch(t.name)
        if match is not None and match["role"] in "rs":
            layer[t] = int(match["layer"])
    waiting: dict[int, list[Tensor]] = {}
    for node in graph:
        states = {layer[t] for s in node.src if s is not None for t in (s, s.root) if t in layer}
        if len(states) == 1 and all(s is None or s.op == "NONE" or s in layer for s in node.src):
            layer[node] = states.pop()
            waiting.setdefault(layer[node], []).append(node)
    nodes: list[Tensor] = []
    for node in graph:
        if node not in layer:
            for needed in {layer[s]: None for s in node.src if s is not None and s in layer}:
                nodes += waiting.pop(needed, [])
            nodes.append(node)
    return Graph([*nodes, *(t for left in waiting.values() for t in left)])


def _is_norm(block: Block) -> bool:
    return block.name == HEAD or _NORM.fullmatch(block.name) is not None


def _start(graph: Graph, first: int) -> int:
    if first and graph.nodes[first - 1].op in _NORM_OPS:
        first -= 1
        if first and graph.nodes[first - 1].op == "ADD" and graph.nodes[first - 1] in graph.nodes[first].src:
            first -= 1
    return first


def _alone(case_id: str, whole: Case, block: Block) -> Case:
    """Return the block in every step of `whole` that has it, with random inputs of order 1.

    Inputs of the whole retain their bytes, as do recorded values other than finite floats: indices, masks.

    Raises:
        UsageError: no step has this block, or one reads a value that had to be recorded and was not.
    """
    steps = []
    known: dict[Block, None] = {}
    for k, step in enumerate(whole.steps):
        graph = _states_last(step.graph, whole.persistent)
        spans = _spans(graph, whole.persistent)
        known |= dict.fromkeys(spans)
        span = spans.get(block) or _reader(graph, block)
        if span is not None:
            first, last = span
            part = partial(graph, first, last, persistent=whole.persistent, outputs=step.outputs)
            if part.outputs:
                steps.append(Step(part.graph, _inputs(case_id, k, step, part), part.outputs, note=step.note))
    if not steps:
        names = ", ".join(f"{b.name} of layer {b.layer}" for b in sorted(known))
        raise UsageError(f"case {case_id!r}: it has no {block.name} of layer {block.layer}; it has {names}")
    used = {t for step in steps for t in step.graph.tensors()}
    persistent = {t: data for t, data in whole.persistent.items() if t in used}
    recipes = {t: recipe for t, recipe in whole.recipes.items() if t in used}
    return Case(
        case_id, persistent, steps, family=whole.family, params=dict(whole.params), seed=whole.seed,
        generator=whole.generator, recipes=recipes,
    )  # fmt: skip


def _inputs(case_id: str, k: int, step: Step, part: Part) -> dict[Tensor, Bytes]:
    used = set(part.graph.tensors())
    inputs = {}
    for i, (leaf, root) in enumerate(part.inputs.items()):
        if leaf not in used:
            continue
        record = step.inputs.get(root, step.expected.get(root))
        if root in step.inputs or (record is not None and not _is_plain(root, record)):
            inputs[leaf] = np.asarray(record)
        elif root.type is F32:
            inputs[leaf] = random_bytes(F32, Stream(case_id, f"step {k} input {i}"), nelements(root), 1.0)
        else:
            raise UsageError(f"case {case_id!r}: step {k} reads {root}, a {root.type} that was not recorded")
    return inputs


def _is_plain(t: Tensor, data: Bytes) -> bool:
    """Return True if the record is finite floats, which random values may replace."""
    return t.type is F32 and bool(np.isfinite(data.view(np.float32)).all())


def _with_seed(body: str) -> str:
    """Return the id of a row with a seed; rows of one model get the same seed."""
    return with_seed(NAME, body, without(body, KEYS)[0])


_ids = ids_of(TABLE, _with_seed)
_ids_with_recordings = ids_of({level: (*TABLE[level], *RECORDED[level]) for level in LEVELS}, _with_seed)


def ids(level: Level) -> Sequence[str]:
    """Return the case ids of a level; recordings only if llama.cpp is installed."""
    try:
        FAMILIES[ZOO].ids("smoke")
    except UnavailableError:
        return _ids(level)
    return _ids_with_recordings(level)


def lacks() -> str:
    """Return the reason why no model can be recorded; empty if one can."""
    return FAMILIES[ZOO].lacks()


def build(case_id: str) -> Case:
    """Build the case of an id.

    Raises:
        UsageError: the id is invalid, no graph can be built from it, or it has no such block.
        UnavailableError: only llama.cpp knows the architecture, and it is not installed.
    """
    body, _ = split_id(case_id, NAME, "ARCH-key=value,layer=N,block=NAME")
    bare, which = without(body, KEYS)
    values, given = read_keys(case_id, which, KEYS)
    source = f"{bare}@{case_id.rpartition('@')[2]}"
    whole = make(f"{NAME}/{source}") if split_arch(bare)[0] else FAMILIES[ZOO].build(f"{ZOO}/{source}")
    case = _alone(case_id, whole, Block(values["layer"], values["block"]))
    return replace(case, family=NAME, params={**case.params, **given})


FAMILY = Family(NAME, "each architecture's sublayers alone", ids, build, lacks=lacks)
