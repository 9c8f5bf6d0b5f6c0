"""Bytes of tensors, set, read, cleared and copied on a ggml device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from marks import needs_wheel

from conformance.backend.registry import Spec
from conformance.ggml.errors import UnavailableError, UsageError
from conformance.ggml.lib.library import Library
from conformance.judge.verdict import Verdict
from conformance.llama.live.access import FAMILY
from conformance.llama.live.transfers import WAYS, play
from conformance.run.isolation.isolate import Isolation

Function = Callable[..., Any]


@needs_wheel
def test_the_cpu_is_right() -> None:
    """Every way passes on the wheel's CPU, which has no events."""
    player = FAMILY.player(Spec("ggml"), Isolation(time_limit=60.0), None)
    try:
        for case_id in FAMILY.ids("smoke"):
            if case_id == "access/event@1":
                with pytest.raises(UnavailableError, match="the device has no events"):
                    player.play(case_id)
            else:
                result = player.play(case_id)
                assert result.verdict is Verdict.PASS, result.detail
    finally:
        player.close()


def _later(k: int) -> Callable[[Function], Function]:
    """A fault: the argument at `k` is larger by one."""
    return lambda function: lambda *a: function(*a[:k], a[k] + 1, *a[k + 1 :])


def _never(_: Function) -> Function:
    """A fault: nothing happens."""
    return lambda *_: None


@needs_wheel
@pytest.mark.parametrize(
    ("way", "function", "fault"),
    [
        ("set", "backend_tensor_set", _later(2)),
        ("get", "backend_tensor_get", _later(2)),
        ("memset", "backend_tensor_memset", _later(3)),
        ("memset", "backend_tensor_memset", _later(1)),
        ("clear", "backend_buffer_clear", _later(1)),
        ("set-2d", "backend_tensor_set_2d", _later(5)),
        ("get-2d", "backend_tensor_get_2d", _later(6)),
        ("set-async", "backend_tensor_set_async", _never),
        ("get-async", "backend_tensor_get_async", _later(3)),
        ("set-2d-async", "backend_tensor_set_2d_async", _later(4)),
        ("get-2d-async", "backend_tensor_get_2d_async", _later(3)),
        ("copy", "backend_tensor_copy", _never),
        ("copy-async", "backend_tensor_copy_async", _never),
    ],
)
def test_a_fault_is_seen(way: str, function: str, fault: Callable[[Function], Function]) -> None:
    """A function that moves other bytes, or none, fails its way."""
    library = Library()
    assert play(library, "CPU", way, 1) == {"wrong": ""}
    sound, seen = getattr(library.ggml, function), []

    def faulty(*arguments: Any) -> Any:  # noqa: ANN401  # as the function
        seen.append(arguments)
        partial = way in ("set", "get") and arguments[2] == 0  # how the harness fills and compares
        return (sound if partial else fault(sound))(*arguments)

    setattr(library.ggml, function, faulty)
    assert play(library, "CPU", way, 1)["wrong"]
    assert seen


@needs_wheel
def test_a_function_that_a_library_lacks_is_unsupported() -> None:
    """An older ggml has no two-dimensional transfers."""
    library = Library()
    library.ggml.backend_tensor_set_2d = None
    found = play(library, "CPU", "set-2d", 1)
    assert found == {"unsupported": "this ggml exports no ggml_backend_tensor_set_2d"}


def test_an_unknown_way_is_refused() -> None:
    """The message lists the ways."""
    with pytest.raises(UsageError, match="one of set, get, memset"):
        FAMILY.build("access/fly@1")
    assert [i.partition("/")[2] for i in FAMILY.ids("smoke")] == [f"{way}@1" for way in WAYS]
