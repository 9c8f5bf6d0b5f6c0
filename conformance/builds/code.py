"""Digests of a library's functions, independent of addresses, line numbers and paths.

Each function is disassembled; a target of a call or jump becomes its symbol, a constant its bytes, a branch the index
of an instruction. Padding, line numbers passed to `ggml_abort`, folders in texts and the numbers of ops are left out.
Parts that the compiler split off (`.isra`, `.part`, `.constprop`, `.cold`) belong to their function.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any

from .elf import FUNCTION, OBJECT, Image, Section, Symbol

_OWN = re.compile(r"ggml|gguf|quantize|tinyBLAS|llamafile|vec_dot|iq[1-4]_?\w")
"""Pattern for the name of a function of ggml."""
_FILES = re.compile(r"ggml|gguf|quants|repack|\bops\.|^vec\.|sgemm|traits|amx|^mmq|hbm")
"""Pattern for the source file of a local function of ggml."""
_FOREIGN = re.compile(
    r"_ZN?K?S[tabsiod]|_ZG|_ZT|_ZN?K?9__gnu_cxx|_ZN?K?8nlohmann|_GLOBAL_|_ZL?[0-9]+(?:__[Pp]yx|clip_|common_)"
)
"""Pattern for library templates, virtual tables and initialisers, which no case selects."""
_CALLERS = ("llama_", "common_", "clip_", "mtmd_", "llm_")
"""Beginnings of names of llama.cpp's own functions."""
_IDENTIFIER = re.compile(r"[0-9]+(?=[A-Za-z_])")
_PARTS = re.compile(r"(?:\.(?:isra|part|constprop|cold|lto_priv|llvm)(?:\.[0-9]+)?)+$|\.[0-9]+$")
_PATH = re.compile(rb"[^\s:\"'(]*/([^\s/:\"'(]+\.(?:c|cc|cpp|cu|h|hpp|m|inc)\b)")
_WIDTHS = {"byte": 1, "word": 2, "dword": 4, "qword": 8, "xmmword": 16, "ymmword": 32, "zmmword": 64, "tbyte": 10}
_RIP = re.compile(r"(?:(\w+) ptr )?\[rip (?:([+-]) (0x[0-9a-f]+|[0-9]+))?\]")
_LINE = re.compile(r"(?:esi, |w1, #)(?:0x[0-9a-f]+|[0-9]+)$")
_OP = re.compile(r"(dword ptr \[\w+ \+ 0x50\], )(0x[0-9a-f]+|[0-9]+)$")
"""Access to the field `op` of a tensor on x86-64."""
_HASH_ADDRESS = re.compile(r"#(0x[0-9a-f]+)$")
_PAGED = re.compile(r"\[(x[0-9]+)(?:, #(0x[0-9a-f]+|[0-9]+))?\]$")
_ADDED = re.compile(r"(x[0-9]+), (x[0-9]+), #(0x[0-9a-f]+|[0-9]+)$")
_PADDING = frozenset({"nop", "endbr64", "int3", "bti", "hint", "udf"})
_KEPT = frozenset(f"x{n}" for n in range(19, 29))
"""Registers of aarch64 that calls preserve."""
_NEAR = 16
"""Instructions between a line number and the call that takes it."""
_LARGEST = 1 << 16
"""Maximum bytes of a table of constants that are hashed."""


def folded(name: str) -> str:
    """Return the function of a symbol, without the compiler's suffixes."""
    return _PARTS.sub("", name)


def is_own(symbol: Symbol) -> bool:
    """Return True for a function of ggml, by its name without parameters, or its file."""
    if _FOREIGN.match(symbol.name):
        return False
    path = scope(symbol.name)
    if path and path[0].startswith(_CALLERS):
        return False
    return bool(_FILES.search(symbol.file) or any(map(_OWN.search, path)))


def scope(name: str) -> list[str]:
    """Return a symbol's identifiers up to template arguments or parameters, outermost first."""
    if name[:2] != "_Z":
        return [name]
    found: list[str] = []
    at, is_nested = 2, False
    while (m := _IDENTIFIER.search(name, at)) and (not found or (is_nested and not name[at : m.start()].strip("LK"))):
        is_nested = is_nested or "N" in name[at : m.start()]
        at = m.end() + int(m[0])
        found.append(name[m.end() : at])
    return found


@cache
def shown(name: str) -> str:
    """Return a symbol as people read it, without parameters: `apply_unary_op<op_gelu>`."""
    if name[:2] != "_Z":
        return name
    full = _demangled(name)
    if not full:
        return "::".join(i for i in scope(name) if not i.startswith("_GLOBAL_"))
    full = _LAMBDA.sub("lambda", _NOISE.sub("", full))
    end, depth = len(full), 0
    for at in range(len(full) - 1, -1, -1):  # the parameters are the last parentheses; a template may have some, too
        depth += {")": 1, "(": -1}.get(full[at], 0)
        if full[at] == "(" and not depth:
            end = at
            break
    text = full[:end]
    return _RETURNED.sub("", text) if "<" in text else text


_NOISE = re.compile(r"\(anonymous namespace\)::|\(ggml_\w+\)|(?<=\d)l\b")
_LAMBDA = re.compile(r"\{lambda\([^)]*\)#(\d+)\}")
_RETURNED = re.compile(r"^(?!vtable )(?:static )?[\w*:]+ (?=\w)")


def _demangled(name: str) -> str:
    """Return a mangled name as the C++ library shows it; empty if it cannot."""
    demangle = _demangler()
    if demangle is None:
        return ""
    status = ctypes.c_int()
    found = demangle(name.encode(), None, None, ctypes.byref(status))
    if status.value or not found:
        return ""
    text = ctypes.string_at(found).decode("utf-8", "replace")
    ctypes.CDLL(None).free(ctypes.c_void_p(found))
    return text


@cache
def _demangler() -> Any:  # noqa: ANN401  # a ctypes function
    try:
        function = ctypes.CDLL("libstdc++.so.6")["__cxa_demangle"]
    except (OSError, AttributeError):
        return None
    function.restype = ctypes.c_void_p
    return function


def functions(image: Image, ops: Mapping[int, str]) -> tuple[dict[str, str], list[str]]:
    """Return function -> digest, and the sorted digests of functions without a name.

    `ops`: number -> op, to leave the numbers out.
    """
    return Code(image, ops).digests()


class Code:
    """The code of one library."""

    def __init__(self, image: Image, ops: Mapping[int, str]) -> None:
        import capstone  # noqa: PLC0415  # most commands compare nothing

        self._image, self._ops = image, ops
        self._arm = image.machine == "EM_AARCH64"
        kind = (
            (capstone.CS_ARCH_ARM64, capstone.CS_MODE_ARM) if self._arm else (capstone.CS_ARCH_X86, capstone.CS_MODE_64)
        )
        self._engine = capstone.Cs(*kind)
        self._engine.skipdata = True
        self._symbols = image.functions
        self._named = {(s.address, s.size) for s in image.symbols if s.type == FUNCTION and s.size}
        self.name: Callable[[int, int], str] = cache(self._name)

    def digests(self) -> tuple[dict[str, str], list[str]]:
        """Return `functions`."""
        parts: dict[str, list[str]] = defaultdict(list)
        done = set[int]()
        for s in self._image.symbols:
            if s.type == FUNCTION and s.size and s.address not in done and is_own(s):
                done.add(s.address)
                parts[folded(s.name)].append(self.digest(s.address, s.size))
        named = {name: p[0] if len(p) == 1 else _digest(sorted(p)) for name, p in parts.items()}
        nameless: list[str] = []
        if self._image.is_stripped:
            known = {a for a, _ in self._named}
            code = {s.address: s for s in self._image.sections if s.is_code and not s.name.startswith(".plt")}
            nameless = sorted(
                self.digest(a, n)
                for a, n in self._image.borders()
                if a not in known and (at := self._image.section(a)) is not None and at.address in code
            )
        return named, nameless

    def digest(self, address: int, size: int) -> str:
        """Return the digest of a function."""
        found = [
            i
            for i in self._engine.disasm_lite(self._image.read(address, size), address)
            if i[2] not in _PADDING and not (i[2] == "xchg" and i[3] == "ax, ax")
        ]
        index = {at: str(k) for k, (at, *_) in enumerate(found)}
        end = address + size
        of = self._arm_line if self._arm else self._line
        pages: dict[str, int] = {}
        lines = [of(i, address, end, index, pages) for i in found]
        for k in self._line_numbers(found, lines, index):
            lines[k] = "line"
        return _digest(lines)

    def _line(self, i: tuple[int, int, str, str], start: int, end: int, index: Mapping[int, str], _: object) -> str:
        at, size, word, operands = i
        if "rip" in operands:
            m = _RIP.search(operands)
            if m:
                far = int(m[3] or "0", 0)
                target = at + size + (far if m[2] != "-" else -far)
                width = 0 if word == "lea" else _WIDTHS.get(m[1] or "", 0)
                operands = f"{operands[: m.start()]}{self.name(target, width)}{operands[m.end() :]}"
        elif operands.startswith("0x") and (word[0] == "j" or word == "call"):
            operands = self._target(int(operands, 0), start, end, index)
        elif self._ops and (m := _OP.search(operands)) and word in ("mov", "cmp"):
            operands = f"{operands[: m.start(2)]}{self._ops.get(int(m[2], 0), m[2])}"
        return f"{word} {operands}"

    def _arm_line(
        self, i: tuple[int, int, str, str], start: int, end: int, index: Mapping[int, str], pages: dict[str, int]
    ) -> str:
        _, _, word, operands = i
        if word in ("adrp", "adr"):
            register, _, page = operands.partition(", #")
            if word == "adr":
                return f"adr {register} {self.name(int(page, 0), 0)}"
            pages[register] = pages[f"last {register}"] = int(page, 0)
            return f"adrp {register}"
        if (word[0] == "b" or word in ("cbz", "cbnz", "tbz", "tbnz")) and (m := _HASH_ADDRESS.search(operands)):
            return f"{word} {operands[: m.start()]}{self._target(int(m[1], 0), start, end, index)}"
        if word == "add" and (m := _ADDED.match(operands)) and m[2] in pages:
            name = self.name(pages[m[2]] + int(m[3], 0), 0)
            pages.pop(m[1], None)
            return f"add {m[1]}, {name}"
        if m := _PAGED.search(operands):
            width = {"q": 16, "d": 8, "x": 8, "s": 4, "w": 4}.get(operands[0], 0)
            held, far = pages.get(m[1]), int(m[2] or "0", 0)
            # a register that one path restored still holds its page on another one
            if held is None and m[1] in _KEPT and self._is_slot(pages.get(f"last {m[1]}", -far) + far):
                held = pages[f"last {m[1]}"]
            if held is not None:
                operands = f"{operands[: m.start()]}{self.name(held + far, width)}"
        if word[:2] != "st":
            pages.pop(operands.partition(",")[0], None)
        return f"{word} {operands}"

    def _is_slot(self, address: int) -> bool:
        """Return True for a slot of the global offset table."""
        section = self._image.section(address)
        return section is not None and section.name.startswith(".got") and address in self._image.relocations

    def _target(self, to: int, start: int, end: int, index: Mapping[int, str]) -> str:
        return index.get(to, "?") if start <= to < end else self.name(to, 0)

    def _name(self, address: int, width: int) -> str:
        """Return what an address is, independently of where it is; `width` bytes are read there."""
        section = self._image.section(address)
        if section is None:
            return "?"
        if section.name.startswith(".plt"):
            return self._stub(address)
        target = self._image.relocations.get(address) if section.name.startswith(".got") else None
        if target is not None:
            return folded(target) if isinstance(target, str) else self.name(target, 0)
        s = self._symbols.at(address)
        if section.is_code:
            return "code" if s is None else folded(s.name)
        return self._datum(address, width, section, s if s is not None and s.type == OBJECT else None)

    def _datum(self, address: int, width: int, section: Section, s: Symbol | None) -> str:
        """Return bytes of a constant, or the name of a variable."""
        image = self._image
        more = 0 if s is None else address - s.address
        if not section.is_constant:
            return section.name if s is None else f"{folded(s.name)}+{more}"
        if s is not None:
            return f"{_digest([image.read(s.address, min(s.size, _LARGEST)).hex()])}+{more}"
        if width:
            return image.read(address, width).hex()
        text = image.text(address)
        return "data" if text is None else plain(text).decode("utf-8", "replace")

    def _stub(self, address: int) -> str:
        """Return the symbol to which an entry of a procedure linkage table jumps."""
        page = 0
        for at, size, word, operands in self._engine.disasm_lite(self._image.read(address, 16), address):
            slot = None
            if word == "adrp":
                page = int(operands.partition("#")[2], 0)
            elif word == "ldr" and (m := _PAGED.search(operands)):
                slot = page + int(m[2] or "0", 0)
            elif (m := _RIP.search(operands)) and "jmp" in word:
                slot = at + size + int(m[3] or "0", 0) * (-1 if m[2] == "-" else 1)
            if slot is not None:
                target = self._image.relocations.get(slot, "?")
                return folded(target) if isinstance(target, str) else self.name(target, 0)
        return "?"

    def _line_numbers(
        self, found: list[tuple[int, int, str, str]], lines: list[str], index: Mapping[int, str]
    ) -> Iterator[int]:
        """Yield the instructions that pass a line number to `ggml_abort`, also past a jump."""
        call, jump = ("bl", "b") if self._arm else ("call", "jmp")
        for k, (_, _, word, operands) in enumerate(found):
            if word == "mov" and _LINE.match(operands) and self._aborts(found, lines, index, k + 1, (call, jump)):
                yield k

    @staticmethod
    def _aborts(
        found: list[tuple[int, int, str, str]],
        lines: list[str],
        index: Mapping[int, str],
        at: int,
        words: tuple[str, str],
    ) -> bool:
        """Return True if the instructions from `at` on lead to a call of `ggml_abort`."""
        call, jump = words
        for _ in range(_NEAR):
            if at >= len(found) or lines[at] == f"{call} ggml_abort":
                return at < len(found)
            word, operands = found[at][2:]
            if word == jump:
                text = operands.lstrip("#")
                at = int(index.get(int(text, 0), -1)) if text.startswith("0x") else -1
                if at < 0:
                    return False
            elif word in (call, "ret") or word[0] in "jb":
                return False
            else:
                at += 1
        return False


def plain(text: bytes) -> bytes:
    """Return a text without the folders of source files in it."""
    return _PATH.sub(rb"\1", text)


def _digest(lines: Iterable[str]) -> str:
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=8).hexdigest()
