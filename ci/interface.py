"""Writes docs/measurements/interface.md: the covered parts of ggml's interface.

    python ci/interface.py                  # the page, from ci/interface.json and the case ids
    python ci/interface.py headers SOURCE   # read ggml's headers (SOURCE: its folder) and the installed library
    python ci/interface.py calls            # run cases and record what they call

An item is covered if it occurs in a case id of level full, if a recorded run called it, or if the op that it builds is
covered. `ci/interface.toml` says why others are excluded, or that they are pending. A function in neither is unknown;
`tests/docs/test_interface.py` fails on one.
"""

from __future__ import annotations

import ctypes
import fnmatch
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

from conformance.ggml.lib import devices, files, library
from conformance.ggml.lib.layout import CType, Signatures

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HERE = Path(__file__).resolve().parent
INVENTORY, RULES = HERE / "interface.json", HERE / "interface.toml"
PAGE = HERE.parent / "docs" / "measurements" / "interface.md"
LOG = "CONFORMANCE_INTERFACE_LOG"
"""Environment variable: the file to which a traced process adds names."""
TABLES = ("ggml_backend_i", "ggml_backend_device_i", "ggml_backend_buffer_i", "ggml_backend_buffer_type_i",
          "ggml_backend_reg_i")  # fmt: skip
"""Function tables of a backend, in `ggml-backend-impl.h`."""
RUNS = {
    "ops": ["--level", "smoke", "--case", "ops/*5", "--backend", "ggml"],
    "trajectories": ["--level", "smoke", "--case", "kv_growth/*", "--case", "weight_placement/*", "--backend", "ggml"],
    "scheduler": ["--level", "smoke", "--case", "gqa/*", "--backend", "ggml?mode=sched"],
    "access": ["--family", "access", "--backend", "ggml"],
    "order": ["--family", "order", "--backend", "ggml"],
    "zoo": ["--case", "zoo/llama-seqs=2,run=p5.d2,set=block_count:1@1", "--backend", "ggml"],
    "arch": ["--case", "arch/llama-real=1@1", "--case", "arch/mamba-real=1@1", "--backend", "ggml?device=CPU"],
    "ref": ["--level", "smoke", "--case", "ops/FLASH_ATTN_EXT-f32*", "--backend", "ggml?ref=on"],
    "audit": ["--level", "smoke", "--case", "audit/*", "--backend", "ggml"],
}
"""Name of a recorded run -> arguments of `conform run`."""


# The inventory: names from headers and from the installed library.


def headers(ggml: Path) -> dict[str, Any]:
    """Read function tables, enumerations, functions and the ops they build from headers."""
    public = {p.name: _code(p) for p in sorted((ggml / "include").glob("*.h"))}
    impl, source = _code(ggml / "src" / "ggml-backend-impl.h"), _code(ggml / "src" / "ggml.c")
    version = re.findall(r"GGML_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)", (ggml / "CMakeLists.txt").read_text("utf-8"))
    declared = {
        name: header
        for header, text in public.items()
        for name in re.findall(r"_API\b[^;{]*?\b(g(?:gml|guf)_\w+)\s*\(", text)
    }
    return {
        "version": ".".join(version[:3]),
        "source": _source(ggml),
        "wheel": f"xllamacpp {metadata.version('xllamacpp')}",
        "tables": {table: re.findall(r"\(\*\s*(\w+)\s*\)", _block(impl, f"struct {table}")) for table in TABLES},
        "enums": {
            name: _members(body)
            for text in public.values()
            for name, body in re.findall(r"\benum\s+(\w+)\s*(\{[^}]*\})", text)
        },
        "functions": declared,
        "builds": _builds(source),
        "calls_table": _wraps(_code(ggml / "src" / "ggml-backend.cpp")),
        "calls_always": _calls(_code(ggml / "src" / "ggml-backend.cpp") + _code(ggml / "src" / "ggml-alloc.c")),
    }


def _source(ggml: Path) -> str:
    """Return name and version of the folder's source package: `llama_cpp_python-0.3.36`."""
    return next(p.name for p in ggml.parents if re.search(r"-\d+\.\d+", p.name))


def _members(body: str) -> dict[str, int]:
    """Return an enumeration's members and values; expressions count as 0."""
    found: dict[str, int] = {}
    for name, value in re.findall(r"\b([A-Z]\w+)\b\s*(?:=\s*([^,}]*[^,}\s]))?\s*(?=[,}])", body):
        number = int(value, 0) if re.fullmatch(r"-?\d\w*", value) else found.get(value, 0)
        found[name] = number if value else next(reversed(found.values()), -1) + 1
    return found


def _code(path: Path) -> str:
    """Return C code without comments."""
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", path.read_text("utf-8"), flags=re.DOTALL)


def _block(text: str, head: str) -> str:
    """Return the text in braces after `head`."""
    begin = re.search(rf"{head}\s*\{{", text)
    assert begin is not None, head
    return text[begin.end() : text.index("};", begin.end())]


def _builds(source: str) -> dict[str, str]:
    """Return function -> op, unary or GLU op of its result, also by a called function."""
    functions = r"\n(?:GGML_API |static )?(?:inline )?struct ggml_tensor ?\* ?(ggml_\w+)\([^;{]*?\)\s*\{(.*?)\n\}"
    bodies = dict(re.findall(functions, source, re.DOTALL))
    found = {
        name: next(filter(None, m.groups()))
        for name, body in bodies.items()
        if (m := re.search(r"(GGML_(?:UNARY|GLU)_OP_\w+)|->op\s*=\s*(GGML_OP_\w+)", body))
    }
    for _ in range(3):  # ggml_mul_inplace calls ggml_mul_impl
        for name, body in bodies.items():
            called = [f for f in re.findall(r"\b(ggml_\w+)\(", body) if f in found and f != name]
            if name not in found and called:
                found[name] = found[called[-1]]
    return found


def _bodies(source: str) -> list[tuple[str, str]]:
    """Return the functions and their bodies."""
    return re.findall(r"\n[\w *]*?\b(ggml_\w+)\([^;{]*?\)\s*\{(.*?)\n\}", source, re.DOTALL)


def _calls(source: str) -> dict[str, list[str]]:
    """Return function -> functions that its outermost block calls unconditionally."""
    outermost = r"^    (?!if\b|for\b|while\b|switch\b|\}|GGML_ASSERT)(\S.*)"
    return {
        name: sorted(
            {f for line in re.findall(outermost, body, re.MULTILINE) for f in re.findall(r"\b(ggml_\w+)\(", line)}
        )
        for name, body in _bodies(source)
    }


def _wraps(source: str) -> dict[str, str]:
    """Return function -> table function that it calls: `ggml_backend_buffer_i.clear`."""
    begins = {"backend": 0, "dev": 1, "buf": 2, "buft": 3, "reg": 4}
    found = {}
    for name, body in _bodies(source):
        called = re.search(r"(\w+)->iface\.(\w+)\s*\(", body)
        if called:
            owner = max((b for b in begins if called[1].startswith(b)), key=len, default="buf")
            found[name] = f"{TABLES[begins[owner]]}.{called[2]}"
    return found


def exported() -> list[str]:
    """Return the C functions of ggml that the installed library exports."""
    command = ["nm", "-D", "--defined-only", str(files.find())]
    listed = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603  # binutils
    return sorted(re.findall(r" T (g(?:gml|guf)_\w+)$", listed.stdout, re.MULTILINE))


# The record of a run: a traced process adds each name once.


def trace() -> None:
    """Record each call of the binding, and of a function table by any caller, from now on."""
    file = os.open(os.environ[LOG], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    seen: set[str] = set()
    quiet = False

    def note(name: str) -> None:
        if name not in seen and not quiet:
            seen.add(name)
            os.write(file, f"{name}\n".encode())

    hooks = Hooks(inventory()["tables"], note)

    class Watched(library.Library):
        """A library whose functions record their calls."""

        def __init__(self, where: str = "") -> None:
            super().__init__(where)
            nonlocal quiet
            quiet, g = True, self.ggml
            for device in (g.backend_dev_get(i) for i in range(g.backend_dev_count())):
                hooks.device(device)
                backend, buft = g.backend_dev_init(device, None), g.backend_dev_buffer_type(device)
                buffer = g.backend_buft_alloc_buffer(buft, 64)
                hooks.check("ggml_backend_reg_i.get_name", g.backend_reg_name, g.backend_dev_backend_reg(device))
                hooks.check("ggml_backend_device_i.supports_buft", g.backend_supports_buft, backend, buft)
                hooks.check("ggml_backend_buffer_type_i.is_host", g.backend_buft_is_host, buft)
                hooks.check("ggml_backend_buffer_i.clear", g.backend_buffer_clear, buffer, 0)
                hooks.check("ggml_backend_i.free", g.backend_free, backend)
                g.backend_buffer_free(buffer)
            quiet = False

        def _bind(self, to: SimpleNamespace, prefix: str, signatures: Signatures) -> list[str]:
            lacking = super()._bind(to, prefix, signatures)
            for name in signatures if prefix in ("ggml_", "gguf_") else ():
                if (function := getattr(to, name)) is not None:
                    setattr(to, name, Traced(function, prefix + name, note))
            return lacking

    own = devices.Registry.function

    def function_of(registry: devices.Registry, name: str, result: CType, *arguments: CType) -> CType:
        function = own(registry, name, result, *arguments)
        return Traced(function, name, note) if function else None

    library.Library = Watched  # type: ignore[misc]  # what is imported later takes it from there
    devices.Registry.function = function_of  # type: ignore[assignment, method-assign]
    _trace_lazy(hooks)


def _trace_lazy(hooks: Hooks) -> None:
    """Record the calls of lazy devices, which are in no registry."""
    machine = importlib.import_module("conformance.llama.live.lazy.device").Machine
    made = machine.__init__

    def watched(self: Any, *arguments: object) -> None:  # noqa: ANN401  # a `Machine`
        made(self, *arguments)
        for device in self.devices:
            hooks.device(device)

    machine.__init__ = watched


class Traced:
    """A function of the binding that records its name when called."""

    VALUES: ClassVar = {
        "ggml_backend_dev_type": "ggml_backend_dev_type",
        "ggml_backend_graph_compute": "ggml_status",
        "ggml_backend_sched_graph_compute": "ggml_status",
    }
    """Function -> the enumeration of its result."""

    _all: tuple[Callable[..., object], str, Callable[[str], None]]

    def __init__(self, function: Callable[..., object], name: str, note: Callable[[str], None]) -> None:
        object.__setattr__(self, "_all", (function, name, note))

    def __call__(self, *args: object) -> object:
        """Call the function."""
        function, name, note = self._all
        note(name)
        result = function(*args)
        if name in self.VALUES:
            note(f"{self.VALUES[name]}={result}")
        if name == "ggml_backend_buffer_set_usage":
            note(f"ggml_backend_buffer_usage={args[1]}")
        return result

    @property
    def _as_parameter_(self) -> object:
        """The function itself, for ctypes."""
        return self._all[0]

    def __getattr__(self, name: str) -> object:
        return getattr(self._all[0], name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._all[0], name, value)


class Hooks:
    """Replaces pointers in function tables by functions that record the call and pass it on.

    The tables of devices are replaced first. Backends, buffer types and buffers are those that a replaced function
    returns, so also the ones that only ggml and llama.cpp see.
    """

    ANY = ctypes.CFUNCTYPE(ctypes.c_void_p, *[ctypes.c_void_p] * 8)
    """A function of a table; each argument fits a register or a word of the stack."""
    RETURNS: ClassVar = {
        "init_backend": ("ggml_backend_i", 8), "get_buffer_type": ("ggml_backend_buffer_type_i", 0),
        "get_host_buffer_type": ("ggml_backend_buffer_type_i", 0), "alloc_buffer": ("ggml_backend_buffer_i", 0),
        "buffer_from_host_ptr": ("ggml_backend_buffer_i", 0),
    }  # fmt: skip
    """Function -> table of the object that it returns, and its offset in the struct.

    `ggml_backend` has a GUID first."""

    def __init__(self, tables: Mapping[str, list[str]], note: Callable[[str], None]) -> None:
        self._tables, self._note = tables, note
        self._ours: dict[int, Any] = {}
        self._last: list[str] = []
        self._others: set[str] = set()
        """Tables with another layout in this library: their calls have no known names."""

    def device(self, pointer: int) -> None:
        """Watch a device and its registry, whose pointer is behind the device's functions."""
        self._hook("ggml_backend_device_i", pointer)
        size = len(self._tables["ggml_backend_device_i"]) * 8
        self._hook("ggml_backend_reg_i", ctypes.c_void_p.from_address(pointer + size).value, 8)

    def check(self, expected: str, function: Callable[..., object], *arguments: object) -> None:
        """Call a function that calls `expected`; record its table only if it does."""
        self._last.clear()
        function(*arguments)
        if expected not in self._last:
            self._others.add(expected.partition(".")[0])

    def _hook(self, table: str, pointer: int | None, offset: int = 0) -> None:
        if not pointer:
            return
        for i, name in enumerate(self._tables[table]):
            slot = ctypes.c_void_p.from_address(pointer + offset + 8 * i)
            if slot.value and slot.value not in self._ours:
                passing = self.ANY(self._passing(table, name, self.ANY(slot.value)))
                slot.value = ctypes.cast(passing, ctypes.c_void_p).value
                self._ours[slot.value or 0] = passing

    def _passing(self, table: str, name: str, function: Callable[..., int | None]) -> Callable[..., int | None]:
        def call(*args: int | None) -> int | None:
            self._last.append(f"{table}.{name}")
            if table not in self._others:
                self._note(f"{table}.{name}")
            result = function(*args)
            if name in self.RETURNS:
                self._hook(self.RETURNS[name][0], result, self.RETURNS[name][1])
            return result

        return call


def calls() -> dict[str, list[str]]:
    """Run `RUNS` and return what each of them called."""
    found = {}
    for name, arguments in RUNS.items():
        with tempfile.TemporaryDirectory(prefix="conformance-interface-") as folder:
            log = Path(folder, "log")
            code = f"import sys; sys.path.append({str(HERE)!r}); import interface; interface.trace()"
            Path(folder, "sitecustomize.py").write_text(code, encoding="utf-8")
            path = os.pathsep.join(filter(None, (folder, str(HERE.parent), os.environ.get("PYTHONPATH"))))
            env = {**os.environ, "PYTHONPATH": path, LOG: str(log)}
            command = [sys.executable, "-m", "conformance.cli", "run", *arguments]
            print(" ".join(command), flush=True)
            done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)  # noqa: S603  # ours
            print(done.stdout[-600:], done.stderr[-600:], sep="\n", flush=True)
            found[name] = sorted(set(log.read_text("ascii").split())) if log.is_file() else []
    return found


# What is covered, by evidence.

OPS = {"ggml_op": "", "ggml_unary_op": "UNARY.", "ggml_glu_op": "GLU."}
"""Enumeration of ops -> text before its members in an id of the family `ops`."""
KEYS = {
    "ggml_type": "type", "ggml_prec": "prec", "ggml_sort_order": "order", "ggml_op_pool": "op",
    "ggml_scale_mode": "mode", "ggml_tri_type": "keep", "ggml_op_hint": "hint", "ggml_scale_flag": "align antialias",
}  # fmt: skip
"""Enumeration -> key of an id whose value is a member, or keys with value 1.

A key with value 1 means the member with that beginning; `type` means the types after the op."""


@dataclass(frozen=True)
class Item:
    """A part of the interface."""

    group: str
    name: str
    status: str
    """`covered`, `pending`, `excluded` or `unknown`."""
    by: str
    """The evidence, or the reason."""
    rule: str = ""
    """The key in `interface.toml`."""


SETTERS = {
    "ggml_flash_attn_ext_add_sinks": "FLASH_ATTN_EXT.sinks",
    "ggml_flash_attn_ext_set_n_kv_max": "FLASH_ATTN_EXT.n_kv_max",
    "ggml_flash_attn_ext_set_prec": "FLASH_ATTN_EXT.prec",
    "ggml_mul_mat_set_hint": "MUL_MAT.hint",
    "ggml_mul_mat_set_prec": "MUL_MAT.prec",
    "ggml_prec_set_acc": "FLASH_ATTN_EXT.prec",
    "ggml_rope_set_offset": "ROPE.offs",
    "ggml_soft_max_add_sinks": "SOFT_MAX.sinks",
}
"""Function that changes a tensor -> the op and the key of an id with the same effect."""
LOOKED_AT = "kv_growth/llama-l=1,embd=32,heads=2,kv=1,ff=32,vocab=32,run=p3.d2@1"
"""A case whose tensors show the flags that cases set."""


def evidence() -> set[str]:
    """Return the parts of case ids in lower case: op, `type=`, `key=value`, `OP.key`, `flags=`."""
    from conformance.suite import FAMILIES  # noqa: PLC0415  # traced processes import this module and no suite

    found: set[str] = set()
    for case in FAMILIES["ops"].ids("full"):
        op, types, *rest = case.partition("/")[2].rpartition("@")[0].split("-", 2)
        parts = [word for part in rest for word in part.split(",")]
        found |= {op, op.partition(".")[0], *(f"type={t}" for t in types.split("+")), *parts}
        found |= {f"{op}.{part.partition('=')[0]}" for part in parts}
    for t in chain.from_iterable(step.graph.tensors() for step in FAMILIES["kv_growth"].build(LOOKED_AT).steps):
        found |= {f"flags={1 << bit}" for bit in range(8) if t.flags >> bit & 1}
    return {word.lower() for word in found}


def inventory() -> dict[str, Any]:
    """Return the names, the effects of functions in the sources, and the recorded calls."""
    found: dict[str, Any] = json.loads(INVENTORY.read_text("ascii"))
    return found


def rules() -> dict[str, dict[str, str]]:
    """Return status -> glob of GROUP.NAME -> reason."""
    return tomllib.loads(RULES.read_text("utf-8"))


def recorded(known: Mapping[str, Any]) -> dict[str, str]:
    """Return function called in recorded runs -> the run, also if called by other functions."""
    ran = {name: f"run `{run}`" for run, names in reversed(known["calls"].items()) for name in names}
    called = list(ran)
    for outer in called:
        for inner in known["calls_always"].get(outer, ()):
            if inner not in ran:
                ran[inner] = f"{ran[outer].partition(':')[0]}: `{outer}`"
                called.append(inner)
    return {part: f"{ran[f].partition(':')[0]}: `{f}`" for f, part in known["calls_table"].items() if f in ran} | ran


def items() -> list[Item]:
    """Return every part of the interface with its status."""
    known, cases, reasons = inventory(), evidence(), rules()
    ran = recorded(known)
    found: list[Item] = []

    def seen(word: str) -> str:
        return f"case ids: `{word}`" if word.lower() in cases else ""

    def add(group: str, name: str, by: str) -> None:
        if by:
            found.append(Item(group, name, "covered", by))
            return
        fitting = (
            Item(group, name, status, why, glob)
            for status in ("pending", "excluded")
            for glob, why in reasons[status].items()
            if fnmatch.fnmatchcase(f"{group}.{name}", glob)
        )
        found.append(next(fitting, Item(group, name, "unknown", "")))

    for table, names in known["tables"].items():
        for name in names:
            add(table, name, ran.get(f"{table}.{name}", ""))
    for enum, members in known["enums"].items():
        for name, value in members.items():
            word = _word(enum, name.removeprefix(_prefix(members)), value)
            add(enum, name, seen(word) or ran.get(f"{enum}={value}", ""))
    builds, declared = known["builds"], known["functions"]
    ops = {i.name: i for i in found if i.group in OPS}
    for name in known["exported"]:
        group = declared.get(name, "not declared in a header")
        op = ops.get(builds.get(name, ""))
        by = f"builds {op.name}" if op is not None and op.status == "covered" else ""
        table, _, function = known["calls_table"].get(name, "").partition(".")
        if any(i.group == table and i.name == function and i.status == "covered" for i in found):
            by = f"calls {table}.{function}"
        add(group, name, ran.get(name) or seen(SETTERS.get(name, "")) or by)
    return found


def _word(enum: str, member: str, value: int) -> str:
    """Return the word of `evidence` that shows a member."""
    if enum in OPS:
        return OPS[enum] + member
    if enum == "ggml_tensor_flag":
        return f"flags={value}"
    first, *more = KEYS.get(enum, "").split(" ")
    return next(f"{k}=1" for k in (first, *more) if member.lower().startswith(k)) if more else f"{first}={member}"


def _prefix(members: Iterable[str]) -> str:
    """Return the common prefix of an enumeration's members, up to an underscore."""
    first, last = min(members), max(members)
    n = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    return re.sub(r"[^_]*$", "", first[:n])


# The page.

HEAD = """# Coverage of ggml's interface

Generated by `python ci/interface.py` from the headers of ggml {version} (the source package {source}),
the functions that the installed llama.cpp exports ({wheel}), the case ids of level full, and recorded runs.

- *covered*: it occurs in a case id; or a recorded run called it, where calls of a function table by ggml and llama.cpp
  count too; or it builds an op, or calls a function of a table, that is covered;
- *pending*: nothing covers it yet; *excluded*: it is no part of what a backend can get wrong; each with the reason;
- *unknown*: none of these. `tests/docs/test_interface.py` allows none.

{share:.1%} of what is not excluded is covered.
"""


def share(found: Iterable[Item]) -> float:
    """Return the covered share of all parts that are not excluded."""
    counts = Counter(i.status for i in found)
    return counts["covered"] / (counts.total() - counts["excluded"])


def page() -> str:
    """Return the page."""
    known, found = inventory(), items()
    groups = list(dict.fromkeys(i.group for i in found))
    states = ("covered", "pending", "excluded", "unknown")
    counts = Counter((i.group, i.status) for i in found)
    lines = [HEAD.format(share=share(found), **{k: known[k] for k in ("version", "source", "wheel")})]
    lines += [f"| part | {' | '.join(states)} |", "|---|" + "---:|" * len(states)]
    lines += [f"| {g} | {' | '.join(str(counts[g, s] or '') for s in states)} |" for g in groups]
    total = Counter(i.status for i in found)
    lines += [f"| **all** | {' | '.join(f'**{total[s]}**' for s in states)} |", ""]
    for status in ("pending", "excluded"):
        lines += [f"## {status.capitalize()}", "", "| what | why |", "|---|---|"]
        by: dict[str, list[Item]] = {}
        for i in found:
            if i.status == status:
                by.setdefault(i.by, []).append(i)
        for why, its in by.items():
            where = ", ".join(f"{n} of {g}" for g, n in Counter(i.group for i in its).items())
            names = ", ".join(f"`{i.name}`" for i in its)
            lines.append(f"| {names if len(its) <= 40 else where} | {why} |")
        lines.append("")
    lines += ["## Covered", "", "| part | what | by |", "|---|---|---|"]
    lines += [f"| {i.group} | `{i.name}` | {i.by} |" for i in found if i.status == "covered"]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the command line."""
    match sys.argv[1:]:
        case []:
            PAGE.write_text(page(), encoding="utf-8", newline="\n")
            print(f"{PAGE}: {share(items()):.1%} covered")
        case ["headers", source]:
            symbols, found = exported(), headers(Path(source))
            known = {
                key: {f: found[key][f] for f in symbols if f in found[key]}
                for key in ("functions", "builds", "calls_table", "calls_always")
            }
            save(**{**found, **known}, exported=symbols)
        case ["calls"]:
            save(calls=calls())
        case _:
            sys.exit(__doc__)


def save(**changed: object) -> None:
    """Change keys of the inventory."""
    kept = inventory() if INVENTORY.is_file() else {}
    INVENTORY.write_text(json.dumps({**kept, **changed}, indent=0) + "\n", encoding="ascii", newline="\n")


if __name__ == "__main__":
    main()
