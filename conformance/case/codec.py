"""A case as one JSON document and named byte arrays, for files and between processes.

The document without defaults (`[a]` is a list, an index counts the list named beside it):

    {"version": 1, "id": str, "family": str, "params": {}, "seed": int, "generator": int, "tolerance": {name: number},
     "provenance": {}, "demands": {},
     "persistent": [tensor],
     "recipes": [{"persistent": index, "stream": str, "tensor": str, "draw": str, "a": number, "b": number,
                  "shared": int, "sha256": str}],
     "placement": [{"persistent": index, "buffer": int, "usage": str}],
     "steps": [{"tensors": [tensor], "nodes": [tensors], "inputs": [tensors], "outputs": [tensors],
                "expected": [tensors], "expected_persistent": [persistent], "note": any}]}
    tensor = {"type": str, "ne": [1 to 4 int], "nb": [4 int], "op": str, "op_params": [up to 16 int32],
              "src": [tensors or null], "view_src": tensors, "view_offs": int, "flags": int, "name": str}
             or, in a step, {"persistent": index}

`ne` omits trailing ones, `op_params` trailing zeros, `nb` the strides of `ggml_new_tensor`, and `nodes` the list of all
tensors whose op is not NONE, in order. A tensor's `src` and `view_src` come before it, so no document can describe a
cycle; only a CPY may name itself, as `ggml_cast` does.

Names of byte arrays: `p3` for persistent[3] before the first step, unless a recipe (`recipe.Recipe`) makes its bytes;
in step k, for tensor j or persistent i, `s{k}/i{j}` for an input, `s{k}/e{j}` for an expected value, `s{k}/c{i}` for
an expected cache.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, TypeVar

from conformance.ggml.errors import CaseFileError, GraphError
from conformance.ggml.graph import Graph
from conformance.ggml.tensor import MAX_DIMS, MAX_OP_PARAMS, MAX_SRC, ZERO_PARAMS, Bytes, Dims, Tensor, contiguous_nb
from conformance.ggml.types import OPS, TYPES, GGMLType

from .case import JSON, MAX_BUFFER, USAGES, Case, Placement, Step
from .recipe import MAX_BYTES, dump_recipe, load_recipes
from .strict import Memory, shown

VERSION = 1
"""Version of the document; a reader refuses any other."""

_ONES = (1,) * MAX_DIMS
_I32 = (-(2**31), 2**31 - 1)
_SIZE = (0, 2**63 - 1)
_INT = (-(2**63), 2**64 - 1)
_OPS = {op: op for op in OPS}  # one string object per op, not one per node
_TENSOR = frozenset({"type", "ne", "nb", "op", "op_params", "src", "view_src", "view_offs", "flags", "name"})
_STEP = frozenset({"tensors", "nodes", "inputs", "outputs", "expected", "expected_persistent", "note"})
_CASE: dict[str, tuple[type, Any]] = {
    "id": (str, ""),
    "family": (str, ""),
    "params": (dict, {}),
    "seed": (int, 0),
    "generator": (int, 1),
    "tolerance": (dict, {}),
    "provenance": (dict, {}),
    "demands": (dict, {}),
}
"""Field of a case -> its JSON type and its default, which a document omits."""

_HEAD = frozenset({*_CASE, "version", "persistent", "recipes", "placement"})

T = TypeVar("T")


def dump(case: Case) -> tuple[JSON, dict[str, Bytes]]:
    """Encode `case` as a document and byte arrays (the case's own, not copies).

    GraphError if a graph is cyclic, or an input, output or expected value is not a tensor of its step.
    """
    doc: dict[str, JSON] = {"version": VERSION}
    for key, (_, default) in _CASE.items():
        value = getattr(case, key)
        if value != default or key == "id":
            doc[key] = value
    blobs: dict[str, Bytes] = {}
    recipes: list[JSON] = []
    places = {t: i for i, t in enumerate(case.persistent)}
    for i, (t, data) in enumerate(case.persistent.items()):
        if t.src or t.view_src is not None:
            raise GraphError(f"persistent[{i}]: {t} must be a leaf that owns its bytes")
        entry = dump_recipe(case.recipes[t], i, t, data) if t in case.recipes else None
        if entry is None:
            blobs[f"p{i}"] = data
        else:
            recipes.append(entry)
    if recipes:
        doc["recipes"] = recipes
    if case.placement:
        if not case.placement.keys() <= places.keys():
            raise GraphError("placement: persistent tensors expected, another tensor found")
        doc["placement"] = _dump_placement(case.placement, places)
    doc["persistent"] = [_dump_tensor(t, {}) for t in case.persistent]
    doc["steps"] = [_dump_step(k, step, places, blobs) for k, step in enumerate(case.steps)]
    return doc, blobs


def load(doc: JSON, blobs: Mapping[str, Bytes], *, validate: bool = True) -> Case:
    """Decode a case, the inverse of `dump`; a persistent tensor is one object in all steps.

    Args:
        doc: the document as from `json.loads`; untrusted.
        blobs: name -> one-dimensional uint8 array; the case uses these arrays.
        validate: also run `Case.validate`; False only for documents of this program.

    Raises:
        CaseFileError: names the field and what is wrong with it.
    """
    doc = _typed(doc, dict, "document")
    case = load_head({key: value for key, value in doc.items() if key != "steps"}, blobs)
    for k, entry in enumerate(_typed(doc.get("steps", []), list, "steps")):
        case.steps.append(load_step(k, entry, case, blobs))
    if validate:
        check(case)
    return case


def load_head(doc: JSON, blobs: Mapping[str, Bytes], memory: Memory | None = None) -> Case:
    """Decode a case without `steps`, not validated; `memory` limits recipes. Raises as `load`."""
    doc = _typed(doc, dict, "document")
    version = doc.get("version")
    if version != VERSION or isinstance(version, bool):
        raise CaseFileError(
            "version", f"{VERSION} expected, {shown(version)} found; read it with the release that wrote it"
        )
    _no_more(doc, _HEAD, "document")
    head: dict[str, Any] = {
        key: _typed(doc.get(key, default.copy() if kind is dict else default), kind, key)
        for key, (kind, default) in _CASE.items()
    }
    if not head["id"]:
        raise CaseFileError("id", "an id family/params@seed expected, nothing found")
    for key in ("seed", "generator"):
        _int(head[key], _INT, key)
    for key, value in head["tolerance"].items():
        if type(value) not in (int, float) or not 0 <= value < math.inf:
            raise CaseFileError(f"tolerance.{shown(key)}", f"a non-negative number expected, {shown(value)} found")
    entries = _typed(doc.get("persistent", []), list, "persistent")
    tensors = [_load_tensor(entry, [], f"persistent[{i}]") for i, entry in enumerate(entries)]
    memory = Memory(MAX_BYTES, 0) if memory is None else memory
    recipes = load_recipes(_typed(doc.get("recipes", []), list, "recipes"), tensors, memory)
    persistent = {
        t: recipes[t][1] if t in recipes else _blob(blobs, f"p{i}", f"persistent[{i}]") for i, t in enumerate(tensors)
    }
    head["placement"] = _load_placement(_typed(doc.get("placement", []), list, "placement"), tensors)
    return Case(persistent=persistent, steps=[], recipes={t: recipe for t, (recipe, _) in recipes.items()}, **head)


def load_step(k: int, entry: JSON, case: Case, blobs: Mapping[str, Bytes]) -> Step:
    """Decode step `k` of `case` from its entry in `steps`, not validated; raises as `load`."""
    where = f"steps[{k}]"
    entry = _typed(entry, dict, where)
    _no_more(entry, _STEP, where)
    held = list(case.persistent)
    graph, tensors = _load_graph(entry, held, where + ".")

    def values(field: str, letter: str, among: Sequence[Tensor]) -> dict[Tensor, Bytes]:
        places = _indices(entry.get(field, []), len(among), f"{where}.{field}")
        return {among[j]: _blob(blobs, f"s{k}/{letter}{j}", f"{where}.{field}") for j in places}

    return Step(
        graph=graph,
        inputs=values("inputs", "i", tensors),
        outputs=tuple(tensors[j] for j in _indices(entry.get("outputs", []), len(tensors), f"{where}.outputs")),
        expected={**values("expected", "e", tensors), **values("expected_persistent", "c", held)},
        note=entry.get("note"),
    )


def check(case: Case) -> None:
    """Run `Case.validate`, but raise CaseFileError."""
    try:
        case.validate()
    except GraphError as e:
        where, _, message = str(e).partition(": ")  # every message of Case.validate starts with its field
        # it quotes untrusted names: reduce it to one printable line of bounded length
        raise CaseFileError(where, "".join(c if c.isprintable() else "\ufffd" for c in message[:1000])) from None


def dump_graph(graph: Graph) -> JSON:
    """Encode a graph without bytes, `{"tensors": …, "nodes": …}`; GraphError if it is cyclic."""
    entry, _ = _dump_graph(graph, {})
    return entry


def load_graph(doc: JSON) -> Graph:
    """Decode a graph, the inverse of `dump_graph`, not validated; raises as `load`."""
    doc = _typed(doc, dict, "graph")
    _no_more(doc, {"tensors", "nodes"}, "graph")
    return _load_graph(doc, [], "")[0]


def _dump_tensor(t: Tensor, index: Mapping[Tensor, int]) -> dict[str, JSON]:
    plain = t.ne[0] % t.type.blck_size == 0 and t.nb == contiguous_nb(t.type, t.ne)
    fields: dict[str, JSON] = {
        "type": t.type.name,
        "ne": [t.ne[0], *_trimmed(t.ne[1:], 1)],
        "nb": None if plain else list(t.nb),
        "op": None if t.op == "NONE" else t.op,
        "op_params": _trimmed(t.op_params, 0) or None,
        "src": [None if s is None else index[s] for s in t.src] or None,
        "view_src": None if t.view_src is None else index[t.view_src],
        "view_offs": t.view_offs or None,
        "flags": t.flags or None,
        "name": t.name or None,
    }
    return {key: value for key, value in fields.items() if value is not None}


def _trimmed(values: Sequence[int], default: int) -> list[int]:
    """Strip trailing `default`s from `values`."""
    n = len(values)
    while n and values[n - 1] == default:
        n -= 1
    return list(values[:n])


def _dump_graph(graph: Graph, places: Mapping[Tensor, int]) -> tuple[dict[str, JSON], dict[Tensor, int]]:
    tensors = graph.tensors()
    index = {t: j for j, t in enumerate(tensors)}
    entry: dict[str, JSON] = {
        "tensors": [{"persistent": places[t]} if t in places else _dump_tensor(t, index) for t in tensors]
    }
    nodes = [index[n] for n in graph.nodes]
    if nodes != [j for j, t in enumerate(tensors) if t.op != "NONE"]:
        entry["nodes"] = nodes
    return entry, index


def _dump_step(k: int, step: Step, places: Mapping[Tensor, int], blobs: dict[str, Bytes]) -> dict[str, JSON]:
    entry, index = _dump_graph(step.graph, places)

    def put(field: str, letter: str, values: Mapping[Tensor, Bytes], ids: Mapping[Tensor, int]) -> None:
        by_index: dict[int, Bytes] = {}
        for t, data in values.items():
            if t not in ids:
                raise GraphError(f"steps[{k}]: {field}: {t} is not a tensor of the step")
            by_index[ids[t]] = data
        if by_index:
            entry[field] = sorted(by_index)  # independent of dict order: equal cases, equal documents
            blobs.update((f"s{k}/{letter}{j}", by_index[j]) for j in sorted(by_index))

    put("inputs", "i", step.inputs, index)
    if step.outputs:
        if any(t not in index for t in step.outputs):
            raise GraphError(f"steps[{k}]: outputs: a tensor is not in the step's graph")
        entry["outputs"] = [index[t] for t in step.outputs]
    put("expected", "e", {t: d for t, d in step.expected.items() if t not in places}, index)
    put("expected_persistent", "c", {t: d for t, d in step.expected.items() if t in places}, places)
    if step.note is not None:
        entry["note"] = step.note
    return entry


def _dump_placement(placement: Mapping[Tensor, Placement], places: Mapping[Tensor, int]) -> list[dict[str, Any]]:
    """Encode `[{"persistent": index, "buffer": int, "usage": str}]`, with `must` if set."""
    by_index = {places[t]: p for t, p in placement.items()}
    return [
        {"persistent": i, "buffer": p.buffer, "usage": p.usage} | ({"must": True} if p.must else {})
        for i, p in sorted(by_index.items())
    ]


def _load_placement(entries: Sequence[Any], tensors: Sequence[Tensor]) -> dict[Tensor, Placement]:
    """Decode a placement; CaseFileError if an entry is malformed or places a tensor twice."""
    out: dict[Tensor, Placement] = {}
    for n, entry in enumerate(entries):
        where = f"placement[{n}]"
        if not isinstance(entry, dict) or entry.keys() - {"must"} != {"persistent", "buffer", "usage"}:
            raise CaseFileError(where, "an object of persistent, buffer, usage expected, something else found")
        i = _int(entry["persistent"], (0, len(tensors) - 1), f"{where}.persistent")
        buffer = _int(entry["buffer"], (0, MAX_BUFFER), f"{where}.buffer")
        if type(entry["usage"]) is not str or entry["usage"] not in USAGES:
            raise CaseFileError(f"{where}.usage", f"one of {', '.join(USAGES)} expected, something else found")
        if type(entry.get("must", False)) is not bool:
            raise CaseFileError(f"{where}.must", "true or false expected, something else found")
        if tensors[i] in out:
            raise CaseFileError(f"{where}.persistent", f"persistent[{i}] already has a placement")
        out[tensors[i]] = Placement(buffer, entry["usage"], entry.get("must", False))
    return out


def _load_graph(entry: Mapping[str, JSON], held: Sequence[Tensor], where: str) -> tuple[Graph, list[Tensor]]:
    tensors: list[Tensor] = []
    used: set[int] = set()
    for j, t in enumerate(_typed(entry.get("tensors", []), list, f"{where}tensors")):
        if type(t) is dict and "persistent" in t:
            at = f"{where}tensors[{j}]"
            _no_more(t, {"persistent"}, at)
            i = _int(t["persistent"], (0, len(held) - 1), f"{at}.persistent")
            if i in used:
                raise CaseFileError(f"{at}.persistent", f"persistent[{i}] occurs twice in this graph")
            used.add(i)
            tensors.append(held[i])
        else:
            tensors.append(_load_tensor(t, tensors, f"{where}tensors[{j}]"))
    if "nodes" in entry:
        nodes = [tensors[j] for j in _indices(entry["nodes"], len(tensors), f"{where}nodes")]
    else:
        nodes = [t for t in tensors if t.op != "NONE"]
    return Graph(nodes), tensors


def _load_tensor(entry: JSON, earlier: Sequence[Tensor], where: str) -> Tensor:
    entry = _typed(entry, dict, where)
    if not entry.keys() <= _TENSOR:
        _no_more(entry, _TENSOR, where)
    name = entry.get("type")
    type_ = TYPES.get(name) if type(name) is str else None
    if type_ is None:
        raise CaseFileError(f"{where}.type", f"one of {', '.join(TYPES)} expected, {shown(name)} found")
    ne = _ints(entry.get("ne"), 1, MAX_DIMS, _SIZE, where, "ne")
    full: Dims = (*ne, *_ONES[len(ne) :])  # type: ignore[assignment]  # the length is four by arithmetic
    name = entry.get("op", "NONE")
    op = _OPS.get(name) if type(name) is str else None
    if op is None:
        raise CaseFileError(f"{where}.op", f"the name of a ggml op expected, {shown(name)} found")
    t = Tensor(type_, full, _load_strides(entry, type_, full, where), op)
    if "op_params" in entry:
        params = _ints(entry["op_params"], 0, MAX_OP_PARAMS, _I32, where, "op_params")
        t.op_params = (*params, *ZERO_PARAMS[len(params) :])
    if "src" in entry:
        t.src = _load_src(entry["src"], t, earlier, f"{where}.src")
    if "view_src" in entry:
        t.view_src = _earlier(entry["view_src"], earlier, f"{where}.view_src")
    if "view_offs" in entry:
        t.view_offs = _int(entry["view_offs"], _SIZE, f"{where}.view_offs")
    if "flags" in entry:
        t.flags = _int(entry["flags"], _I32, f"{where}.flags")
    if "name" in entry:
        t.name = _typed(entry["name"], str, f"{where}.name")
    return t


def _load_strides(entry: Mapping[str, JSON], type_: GGMLType, ne: Dims, where: str) -> Dims:
    if "nb" in entry:
        return _ints(entry["nb"], MAX_DIMS, MAX_DIMS, _SIZE, where, "nb")  # type: ignore[return-value]  # four
    if ne[0] % type_.blck_size:
        raise CaseFileError(f"{where}.ne", f"ne[0] must be a multiple of {type_}'s block of {type_.blck_size}: {ne[0]}")
    return contiguous_nb(type_, ne)


def _load_src(value: JSON, t: Tensor, earlier: Sequence[Tensor], where: str) -> tuple[Tensor | None, ...]:
    src = _typed(value, list, where)
    if len(src) > MAX_SRC:
        raise CaseFileError(where, f"at most {MAX_SRC} expected, {len(src)} found")
    own = len(earlier) if t.op == "CPY" else -1
    return tuple(
        None if s is None else t if s == own and type(s) is int else _earlier(s, earlier, f"{where}[{i}]")
        for i, s in enumerate(src)
    )


def _typed(value: JSON, kind: type[T], where: str) -> T:
    if type(value) is not kind:
        words = {dict: "an object", list: "a list", str: "text", int: "an integer"}
        raise CaseFileError(where, f"{words[kind]} expected, {shown(value)} found")
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:  # JSON allows half of a surrogate pair
            raise CaseFileError(where, f"text in Unicode expected, a lone surrogate found in {shown(value)}") from None
    return value


def _int(value: JSON, limits: tuple[int, int], where: str) -> int:
    if type(value) is not int or not limits[0] <= value <= limits[1]:
        raise CaseFileError(where, f"an integer from {limits[0]} to {limits[1]} expected, {shown(value)} found")
    return value


def _ints(value: JSON, least: int, most: int, limits: tuple[int, int], where: str, field: str) -> tuple[int, ...]:
    if type(value) is not list or not least <= len(value) <= most:
        count = f"{least}" if least == most else f"{least} to {most}"
        raise CaseFileError(f"{where}.{field}", f"a list of {count} integers expected, {shown(value)} found")
    low, high = limits
    for i, v in enumerate(value):
        if type(v) is not int or not low <= v <= high:
            _int(v, limits, f"{where}.{field}[{i}]")
    return tuple(value)


def _indices(value: JSON, count: int, where: str) -> list[int]:
    places = [_int(j, (0, count - 1), f"{where}[{i}]") for i, j in enumerate(_typed(value, list, where))]
    if len(set(places)) != len(places):
        raise CaseFileError(where, "an index occurs twice")
    return places


def _earlier(value: JSON, earlier: Sequence[Tensor], where: str) -> Tensor:
    if type(value) is not int or not 0 <= value < len(earlier):
        raise CaseFileError(
            where, f"the index of one of the {len(earlier)} tensors before it expected, {shown(value)} found"
        )
    return earlier[value]


def _blob(blobs: Mapping[str, Bytes], name: str, where: str) -> Bytes:
    try:
        return blobs[name]
    except KeyError:
        raise CaseFileError(where, f"its bytes {name!r} are missing") from None


def _no_more(value: Mapping[str, JSON], known: AbstractSet[str], where: str) -> None:
    for key in value:
        if key not in known:
            raise CaseFileError(f"{where}.{shown(key)}", f"unknown; one of {', '.join(sorted(known))} expected")
