"""The innermost message of an error, and the form of it that is equal in errors of one kind."""

from __future__ import annotations

import re

from .evidence import Error

_NUMBER = re.compile(r"0x[0-9a-fA-F]+|[-+]?[0-9]+(?:\.[0-9]+)?(?:e[-+]?[0-9]+)?")
# They are applied to untrusted text, so each must run in linear time.
_TELLING = re.compile(r"assert|abort|fatal|error|terminate|what\(\)|memory", re.IGNORECASE)
_PASSED_ON = re.compile(r"^.*?[eE]xception: (?=.)(?:Check '.*' failed at \S+: FrontEnd API failed with \w+: )?")
_WRAPPER = re.compile(
    r"Exception from \S+?:[0-9]+:\s*|(?<=Check ')([^']*)' failed at \S+:\s*|(?<!\S)\S*/(?=[\w.-]+:[0-9]+)"
)
"""Text that OpenVINO and ggml add to a message: callers, and paths of sources."""
_VALIDATED = re.compile(r"While validating node '(\S+) [^']*' with friendly_name '[^']*'")
_NAMED = re.compile(r"with name '(?:[A-Z]\w{0,80}?_[0-9]{1,12}_?)?([^'(]{0,200}?)-?[0-9]{0,12}(?: \([^']*)?'")
_TYPED = re.compile(r"Node \S+(?: \([^:']*?)? of type (\w+)")
_TENSOR = re.compile(
    r"(?<=pre-allocated tensor) \(.{0,300}\)(?= in a buffer)|(?<=cannot run the operation) \([A-Z_0-9]+\)"
)
"""Parts of a message that name a node; its op and plain name stay."""
_DAMAGED = re.compile(
    r"(?:malloc|free|realloc|munmap_chunk|malloc_consolidate)\(\): |corrupted|double free|stack smashing"
    r"|Fatal glibc error: malloc"
)
"""Messages of the C library about a damaged heap, which vary at random."""
_TEXTLESS = re.compile(r": [\w.-]{1,100}:[0-9]{1,9}: fatal error$")
"""ggml's `GGML_ABORT("fatal error")`."""
_SHAPE = re.compile(r"[\[({][-?.#,x;:\s]*[\])}]")
_LONGEST = 240
_ON_HOST = re.compile(r"GGML_ASSERT|GGML_ABORT|\.(?:c|cpp|h|cc|m|cu):#")
"""Messages with which ggml aborts."""
DIED, DAMAGED = "its process died", "the heap is damaged"
_DIED = re.compile(rf"{DIED} \([^)]*\)(?:: {DAMAGED})?")


def by_damage(kind: str) -> bool:
    """Return True if a crash of this kind may be damaged memory, which varies at random."""
    return _DIED.fullmatch(kind) is not None


def on_host(message: str) -> bool:
    """Return True if ggml itself ended with this innermost message, so no driver is at fault."""
    return _ON_HOST.search(message) is not None


def innermost(error: Error) -> str:
    """Return the innermost message with `#` for numbers and shapes, to compare failures.

    A message without text of its own keeps its line of the source: other lines are other errors.
    """
    text = _innermost(error)
    return " ".join(text.split())[:_LONGEST] if _TEXTLESS.search(text) else masked(text)


def masked(text: str) -> str:
    """Return a message with `#` for numbers and shapes, to compare failures."""
    return " ".join(_SHAPE.sub("#", _NUMBER.sub("#", text)).split())[:_LONGEST]


def without_line(message: str) -> str:
    """Return an innermost message without its line of the source, which differs between ops."""
    return _TEXTLESS.sub(": fatal error", message)


def between_builds(error: Error) -> str:
    """Return the innermost message without lines of the source, which move from build to build."""
    return without_line(innermost(error))


def said(error: Error) -> str:
    """Return the innermost message of a failure, or how the process died and its assertion."""
    return " ".join(_innermost(error).split())[:_LONGEST]


def _innermost(error: Error) -> str:
    text = _PASSED_ON.sub("", error.words or error.message)
    if error.died:
        lines = error.words.split("\n")
        telling = [line for line in lines if _TELLING.search(line)] or lines[-1:]
        said = DAMAGED if _DAMAGED.search(telling[0]) else _TENSOR.sub("", telling[0])
        text = f"{DIED} ({error.died}): {said}" if said else f"{DIED} ({error.died})"
    text = _WRAPPER.sub(lambda m: f"{m[1]}': " if m[1] is not None else "", text)
    return _NAMED.sub(lambda m: f"'{m[1]}'" if m[1] else "", _TYPED.sub(r"\1", _VALIDATED.sub(r"\1", text)))
