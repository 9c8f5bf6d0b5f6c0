"""The scheduler on lazy devices: right numbers, injected faults, failures on request."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import pytest
from marks import needs_wheel

from conformance.backend.registry import Spec
from conformance.ggml.errors import BackendCrashError, UnavailableError, UsageError
from conformance.ggml.lib.devices import Registry
from conformance.ggml.lib.library import Library
from conformance.ggml.lib.tables import INTERFACES, Callbacks, interface
from conformance.judge.verdict import Pair, Result, Verdict
from conformance.llama.live import order
from conformance.llama.live.lazy import programs
from conformance.llama.live.lazy.buffers import Place
from conformance.llama.live.lazy.device import Machine
from conformance.llama.live.lazy.programs import STEPS, Step, Streams
from conformance.llama.live.lazy.run import ASKS, SORTS, Fail, Setting
from conformance.llama.live.lazy.timeline import Moment
from conformance.llama.live.lazy.worker import play
from conformance.llama.live.llama import Process
from conformance.run.isolation.isolate import Isolation

PAIR = Pair("order/x@1", "ggml")

Steps = Mapping[str, Step]
Change = Callable[[Steps], Steps]


@pytest.fixture(scope="module")
def machine() -> Machine:
    """Lazy devices of the wheel's library."""
    return Machine(Library())


def played(machine: Machine, case_id: str) -> tuple[Result, dict[str, Any]]:
    """Play a case in this process; return its result and the worker's reply."""
    it = order.read(case_id)
    said = play(machine, it.program, it.params, it.devices, it.setting)
    return order.judge(Result(*PAIR, Verdict.PASS), it.setting.fail, said), said


@needs_wheel
def test_a_player_answers_by_id() -> None:
    """The worker plays a case, and a build that is no library or has another device is refused."""
    player = order.FAMILY.player(Spec("ggml"), Isolation(time_limit=60.0), None)
    try:
        result = player.play("order/sched-refuse=RMS_NORM,lazy=last@1")
        assert result.verdict is Verdict.PASS, result.detail
        assert result.metrics["graph_compute"] > 0
    finally:
        player.close()
    with pytest.raises(UnavailableError, match="name no device"):
        order.FAMILY.player(Spec("ggml", (("device", "Vulkan0"),)), Isolation(), None)


@needs_wheel
@pytest.mark.parametrize("lazy", ["first", "last", "any", "last+first", "any+last"])
def test_numbers_are_right_in_100_seeds(machine: Machine, lazy: str) -> None:
    """Two devices and the CPU compute what the CPU alone computes, and nothing races."""
    for seed in range(20):
        case_id = f"order/sched-devices=2,copies=4,refuse=RMS_NORM,n=4x4x4x1x4x4,reserve=4,lazy={lazy}@{seed}"
        result, said = played(machine, case_id)
        assert (result.verdict, said["races"], said["wrong"]) == (Verdict.PASS, [], ""), result.detail
    assert said["calls"]["cpy_tensor_async"] > 0


@needs_wheel
def test_smoke_passes(machine: Machine) -> None:
    """No case of level smoke reports anything."""
    for case_id in (i for i in order.FAMILY.ids("smoke") if not order.read(i).model):
        result, _ = played(machine, case_id)
        assert result.verdict is Verdict.PASS, (case_id, result.detail)


@needs_wheel
def test_the_scheduler_overwrites_a_copy_that_is_being_read(machine: Machine) -> None:
    """The fault of docs/measurements/findings: found by every seed, with both accesses and the missing event."""
    for seed in range(3):
        result, said = played(machine, f"order/sched-devices=2,copies=4,n=4x4x4x4x4,reserve=4@{seed}")
        assert result.verdict is Verdict.FAIL
        assert len(said["races"]) == 1
        assert said["races"][0].startswith("cpy_tensor_async (LAZY0, #15): writes LAZY1#node_22#0")
        assert said["races"][0].endswith("no event recorded on LAZY1 after it that LAZY0 waits for")


@needs_wheel
def test_llama_runs_on_lazy_devices() -> None:
    """A model gives the CPU's logits, split by layers; split by tensors it shows the race of the meta device."""
    player = order.FAMILY.player(Spec("ggml"), Isolation(time_limit=600.0), None)
    model = "order/llama-real=1,ubatch=4,run=p12.d1,devices=2,lazy=last"
    try:
        result = player.play(f"{model}@1")
        assert result.verdict is Verdict.PASS, result.detail
        assert result.metrics["event_synchronize"] > 0
        result = player.play(f"{model},tensor=1@1")
        assert result.verdict is Verdict.FAIL
        assert "writes a tensor (LAZY1#" in result.detail
        result = player.play("order/llama-real=1,ubatch=4,run=p12.d1,layers=0,offload=1@1")
        assert result.verdict is Verdict.PASS, result.detail
        assert result.metrics["graph_compute"] > 0
        result = player.play("order/llama-real=1,ubatch=4,run=p12.d1,shared=1@1")
        assert result.verdict is Verdict.FAIL
        assert "GET_ROWS reads inp_tokens (the host's) that changed" in result.detail
        result = player.play("order/llama-real=1,do=contexts-threads@1")
        assert result.verdict is Verdict.PASS, result.detail
        result = player.play(f"{model},fail=compute:2@1")
        assert result.verdict is Verdict.PASS, result.detail
    finally:
        player.close()


@needs_wheel
def test_a_graph_of_a_known_uid_runs_again(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler numbers changed splits anew; a number that does not change gives wrong values."""
    case_id = "order/sched-devices=2,refuse=RMS_NORM,again=2,copies=4,uid=1@1"
    result, said = played(machine, case_id)
    assert result.verdict is Verdict.PASS, result.detail
    assert said["calls"]["graph_reused"] > 0
    monkeypatch.setattr(machine.graphs, "_uid", lambda _: 1)
    result, said = played(machine, "order/sched-n=4x4,uid=1@1")
    assert result.verdict is Verdict.FAIL
    assert said["wrong"]


@needs_wheel
@pytest.mark.parametrize("optimize", [SORTS, ASKS])
def test_nodes_may_run_in_another_order(machine: Machine, optimize: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In all legal ones; if nothing is asked to stay allocated, or uses are ignored, values are wrong."""
    case_id = f"order/sched-side=1,again=1,optimize={optimize},lazy=any@"
    orders = set()
    sort = machine.graphs._sort

    def seen(nodes: Sequence[int]) -> list[int]:
        found = sort(nodes)
        orders.add(tuple(map(nodes.index, found)))
        return found

    monkeypatch.setattr(machine.graphs, "_sort", seen)
    for seed in range(3):
        result, _ = played(machine, f"{case_id}{seed}")
        assert result.verdict is Verdict.PASS, result.detail
    assert len(orders) > 5
    if optimize == ASKS:
        monkeypatch.setattr(machine.graphs, "_keep", lambda *_: None)
    else:
        monkeypatch.setattr(machine.graphs, "_uses", lambda node: (set(), {node}))
    assert any(played(machine, f"{case_id}{seed}")[0].verdict is Verdict.FAIL for seed in range(3))


@needs_wheel
def test_allocation_dependencies_need_a_ggml_that_knows_them(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older one passes no structure that could be called."""
    monkeypatch.setattr(machine.graphs, "_asks", False)
    with pytest.raises(UnavailableError, match="its graph_optimize takes no allocation dependencies"):
        played(machine, f"order/sched-optimize={ASKS}@1")


@needs_wheel
def test_plans_are_computed_again(machine: Machine) -> None:
    """With other inputs, in turn, on the CPU and a device; a failure is reported."""
    result, said = played(machine, "order/plan-again=2,lazy=last@1")
    assert (result.verdict, said["calls"]["graph_plan_compute"]) == (Verdict.PASS, 9), result.detail
    result, said = played(machine, "order/plan-fail=compute:2@1")
    assert (result.verdict, said["reported"]) == (Verdict.PASS, "ggml_backend_graph_plan_compute returned -1")


@needs_wheel
def test_decoders_run_in_threads(machine: Machine) -> None:
    """They share weights, and nothing else; the order of their calls is the seed's."""
    for seed in range(3):
        case_id = f"order/sched-devices=2,refuse=RMS_NORM,copies=4,threads=3,n=4x4x4,lazy=any@{seed}"
        result, said = played(machine, case_id)
        assert result.verdict is Verdict.PASS, result.detail
        assert played(machine, case_id)[1] == said
    result, said = played(machine, "order/sched-threads=2,fail=compute:3@1")
    assert (result.verdict, said["reported"]) == (
        Verdict.PASS,
        "ggml_backend_sched_graph_compute_async returned -1",
    ), result.detail


@needs_wheel
def test_a_device_may_read_the_memory_of_the_host(machine: Machine) -> None:
    """A batch on the CPU overwrites what the one before still reads there; one batch alone is right."""
    result, said = played(machine, "order/sched-refuse=RMS_NORM,shared=1,n=4x4x4,reserve=4@1")
    assert result.verdict is Verdict.FAIL
    assert "(the host's) that changed before they were read" in said["races"][0]
    assert said["wrong"]
    result, said = played(machine, "order/sched-refuse=RMS_NORM,shared=1,n=4,lazy=any@1")
    assert (result.verdict, said["calls"].get("cpy_tensor_async")) == (Verdict.PASS, None), result.detail


@needs_wheel
@pytest.mark.parametrize("on_cpu", [True, False])
def test_a_model_that_crashes_everywhere_is_a_crash_of_the_build(on_cpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The devices are not to blame if the CPU alone crashes, too, which the message says; the build is."""

    def ask(_: Process, **request: object) -> dict[str, Any]:
        if request["devices"] or on_cpu:
            raise BackendCrashError("its process died", died="SIGSEGV")
        return {}

    monkeypatch.setattr(Process, "ask", ask)
    player = order.FAMILY.player(Spec("ggml"), Isolation(time_limit=600.0), None)
    try:
        with pytest.raises(BackendCrashError, match="its process died") as caught:
            player.play("order/llama-real=1,devices=2@1")
    finally:
        player.close()
    assert ("on the CPU alone, too" in str(caught.value), caught.value.died) == (on_cpu, "SIGSEGV")


@needs_wheel
def test_a_copy_from_the_cpu_may_be_late(machine: Machine) -> None:
    """The next batch overwrites what it reads; #26040 is mended, so within a graph nothing does."""
    result, said = played(machine, "order/sched-refuse=RMS_NORM,host=1,n=4x4x4,reserve=4@1")
    assert result.verdict is Verdict.FAIL
    assert said["races"][0].startswith("cpy_tensor_async (LAZY0, #7): reads 512 bytes of the host that changed")
    assert said["wrong"]
    result, _ = played(machine, "order/sched-refuse=RMS_NORM,host=1,side=1@1")
    assert result.verdict is Verdict.PASS, result.detail


def test_a_connection_that_breaks_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client's process ends with RPC's message, and the same server is right again; another end is a crash."""
    words = "Remote RPC server crashed or returned malformed response"
    wrong = ""

    def ask(_: Process, **request: Any) -> dict[str, Any]:  # noqa: ANN401
        assert request["params"]["endpoint"] == "host:1"
        if request["setting"]["fail"]["what"]:
            raise BackendCrashError(f"its process died (SIGABRT): {words}", died="SIGABRT")
        return {"races": [], "wrong": wrong, "reported": "", "failures": 0, "calls": {"rpc_bytes": 9}}

    monkeypatch.setattr(Process, "ask", ask)
    monkeypatch.setattr(order.Player, "_endpoint", lambda _: "host:1")
    player = order.FAMILY.player(Spec("ggml"), Isolation(), None)
    result = player.play("order/rpc-fail=drop:9@1")
    assert (result.verdict, result.detail) == (Verdict.PASS, f"its process died (SIGABRT): {words}")
    wrong = "value 0"
    result = player.play("order/rpc-fail=drop:9@1")
    assert (result.verdict, result.detail) == (Verdict.FAIL, "after the failure, value 0")
    words = "double free"
    with pytest.raises(BackendCrashError):
        player.play("order/rpc-fail=drop:9@1")
    player.close()


def test_the_wheel_has_no_rpc() -> None:
    """The program needs a build with a server."""
    player = order.FAMILY.player(Spec("ggml"), Isolation(), None)
    with pytest.raises(UnavailableError, match="needs a build with an RPC server; the wheel has none"):
        player.play("order/rpc-piece=7@1")
    player.close()


# faults of a caller, injected with knowledge of the device


def without(name: str) -> Change:
    """A step is missing."""
    return lambda steps: {k: v for k, v in steps.items() if k != name}


def instead(name: str, step: Step) -> Change:
    """Another step takes the place of one."""
    return lambda steps: {k: step if k == name else v for k, v in steps.items()}


def before(name: str, other: str, step: Step | None = None) -> Change:
    """A step, or a new one, comes earlier, right before another."""

    def change(steps: Steps) -> Steps:
        moved = {name: step or steps[name]}
        out: dict[str, Step] = {}
        for k, v in steps.items():
            out |= moved if k == other else {}
            out |= {} if k == name else {k: v}
        return out

    return change


def _freed(s: Streams) -> None:
    with ExitStack() as own:
        (t,) = replace(s.caller, owned=own).tensors(s.second, (programs.WIDTH, 4))
        s.double(s.second, s.y, t)


def _used(s: Streams) -> None:
    own = ExitStack()
    (t,) = replace(s.caller, owned=own).tensors(s.second, (programs.WIDTH, 4))
    s.g.backend_buffer_free(s.caller.library.struct(t).buffer)
    s.upload(s.second, t, s.data[0])
    own.pop_all()  # only the buffer was freed: the tensor lives as long as the stack


def _clear(s: Streams) -> None:
    s.g.backend_buffer_clear(s.caller.library.struct(s.u).buffer, 0)


def _memset(s: Streams) -> None:
    s.g.backend_tensor_memset(s.y, 0, 4, 8)


def _reused(s: Streams) -> None:
    s.data[1][:] = 0


FAULTS: dict[str, Change] = {
    "event never recorded": without("record x"),
    "event never waited for": without("wait x"),
    "event recorded too early": before("record x", "set x"),
    "event waited for on another queue": instead("wait x", lambda s: s.wait(s.other, 0)),
    "event of the second queue never recorded": without("record y"),
    "overwritten while it is read": without("wait y"),
    "event of the second queue recorded too early": before("record y", "y = 2 x"),
    "copy on the wrong source queue": instead("z = y", lambda s: s.copy(s.other, s.other, s.y, s.z)),
    "copy in the wrong direction": instead("z = y", lambda s: s.copy(s.second, s.other, s.z, s.y)),
    "copy missing": without("z = y"),
    "read by the caller without waiting": without("wait for other"),
    "read from the device without waiting": without("wait for first"),
    "written without waiting": without("wait for second"),
    "waited for the wrong queue": instead("wait for second", lambda s: s.synchronize(s.first)),
    "waited for an event before the copy": instead(
        "wait for second", lambda s: s.caller.call("backend_event_synchronize")(s.events[1])
    ),
    "host memory reused": before("reuse", "wait for other", _reused),
    "buffer freed in flight": before("free", "wait for other", _freed),
    "buffer used after it was freed": before("use", "wait for other", _used),
    "buffer cleared in flight": before("clear", "wait for other", _clear),
    "tensor set in flight": before("memset", "z = y", _memset),
    "tensor written by another queue": instead("set x again", lambda s: s.upload(s.other, s.x, s.data[1])),
}
"""Fault -> the change of `STEPS`."""


@needs_wheel
@pytest.mark.parametrize("fault", FAULTS)
def test_an_injected_fault_is_found(machine: Machine, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By each seed, the same way every time; a fault that races is found even by an eager device."""
    changed = FAULTS[fault](STEPS)
    assert list(changed.items()) != list(STEPS.items())

    def streams(caller: programs.Caller, params: Mapping[str, Any]) -> Iterator[programs.F32]:
        return programs.streams(caller, params, changed)

    monkeypatch.setitem(programs.PROGRAMS, "streams", streams)

    def found(lazy: Moment, seed: int) -> tuple[str, list[str]]:
        said = play(machine, "streams", {}, (0, 0, 1), Setting((lazy,), seed))
        return said["wrong"], said["races"]

    for seed in range(3):
        assert any(found("last", seed))
        assert found("last", seed) == found("last", seed)
        assert found("any", seed) == found("any", seed)
    races = found("last", 0)[1]
    visible = [race for race in races if "that changed" not in race]
    assert found("first", 0)[1] == visible


@needs_wheel
def test_a_call_that_the_caller_forgets_is_found(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the real scheduler, too."""
    monkeypatch.setattr(machine.g, "backend_sched_synchronize", lambda *_: None)
    _, said = played(machine, "order/sched-devices=2,lazy=last@1")
    assert "no ggml_backend_synchronize of LAZY" in said["races"][0]


def _resets_first(machine: Machine) -> Callable[..., Any]:
    """`ggml_backend_sched_reserve` as it was until #17232."""
    reserve, reset = machine.g.backend_sched_reserve, machine.g.backend_sched_reset
    return lambda *a: (reset(a[0]), reserve(*a))[1]


def _keeps_more(machine: Machine) -> Callable[..., Any]:
    """`ggml_backend_sched_get_buffer_size` of a ggml that reserves a byte more each time."""
    size, more = machine.g.backend_sched_get_buffer_size, count()
    return lambda *a: size(*a) + next(more)


def _does_not_wait(name: str) -> Callable[[Machine], Callable[..., Any]]:
    """A function of asynchronous transfers as it was until #19179, where a device has none of its own."""
    return lambda machine: lambda _, *a: getattr(machine.g, name)(*a)


@needs_wheel
@pytest.mark.parametrize(
    ("case_id", "function", "fault", "said"),
    [
        ("sched-devices=2,copies=4,reserve=4,pin=1", "backend_sched_reserve", _resets_first, "no allocation expected"),
        ("sched-n=16x4x1,reserve=16,pin=1", "backend_sched_reserve", _resets_first, "no allocation expected"),
        ("sched-n=5x3,deep=1,extra=1000", "backend_sched_get_buffer_size", _keeps_more, "no more expected"),
        ("sched-refuse=RMS_NORM,blocking=1", "backend_tensor_get_async", _does_not_wait("backend_tensor_get"), "get_t"),
        ("streams-blocking=1", "backend_tensor_set_async", _does_not_wait("backend_tensor_set"), "set_tensor"),
        (
            "sched-devices=2,reserve=4,pin=1",
            "backend_sched_set_tensor_backend",
            lambda _: lambda *_: None,
            "not on the CPU",
        ),
    ],
)
def test_a_past_fault_of_the_scheduler_is_found(
    machine: Machine,
    case_id: str,
    function: str,
    fault: Callable[[Machine], Callable[..., Any]],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The case passes, and fails once ggml behaves as it did before the fix."""
    result, _ = played(machine, f"order/{case_id},lazy=last@1")
    assert result.verdict is Verdict.PASS, result.detail
    monkeypatch.setattr(machine.g, function, fault(machine))
    result, _ = played(machine, f"order/{case_id},lazy=last@1")
    assert (result.verdict, said in result.detail) == (Verdict.FAIL, True), result.detail


def _allocated(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the size of each buffer from now on."""
    sizes: list[int] = []
    alloc = machine.buffers.alloc

    def seen(device: str, buft: int, size: int) -> int:
        sizes.append(size)
        return alloc(device, buft, size)

    monkeypatch.setattr(machine.buffers, "alloc", seen)
    return sizes


@needs_wheel
def test_memory_is_split_where_a_buffer_has_a_largest_size(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """No buffer is larger, and there are more of them."""
    sizes = _allocated(machine, monkeypatch)
    case_id = f"order/sched-n=16x32,reserve=32,largest={order.LARGEST},lazy=last@1"
    result, _ = played(machine, case_id)
    assert result.verdict is Verdict.PASS, result.detail
    split = sizes.copy()
    sizes.clear()
    played(machine, "order/sched-n=16x32,reserve=32,lazy=last@1")
    assert max(split) == order.LARGEST < max(sizes)
    assert len(split) > len(sizes)


@needs_wheel
def test_a_product_has_the_bytes_that_its_device_asks_for(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are in its buffer, and no other tensor that is alive is there, whatever their number is."""
    sizes = _allocated(machine, monkeypatch)
    taken = []
    for extra in (0, 1, 20, 64, 1000):
        result, said = played(machine, f"order/sched-devices=2,n=3x1x5x7,extra={extra},lazy=any@{extra}")
        assert (result.verdict, said["races"]) == (Verdict.PASS, []), result.detail
        taken.append(sum(sizes))
        sizes.clear()
    assert taken == sorted(taken)
    assert taken[-1] >= taken[0] + 1000


@needs_wheel
def test_a_device_writes_the_bytes_that_it_asked_for(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """If another tensor is there, its values are wrong: here the product itself is."""
    place = machine.buffers.place

    def at_begin(tensor: int, offset: int, size: int, *, writes: bool, op: str = "") -> Place:
        return place(tensor, 0 if writes and not op else offset, size, writes=writes, op=op)

    case_id = "order/sched-devices=2,n=3x1x5x7,extra=20,lazy=last@1"
    assert played(machine, case_id)[0].verdict is Verdict.PASS
    monkeypatch.setattr(machine.buffers, "place", at_begin)
    result, _ = played(machine, case_id)
    assert result.verdict is Verdict.FAIL
    assert "nan found" in result.detail


# failures on request


@needs_wheel
@pytest.mark.parametrize("split", ["refuse=RMS_NORM", "devices=2,refuse=RMS_NORM,copies=4"])
@pytest.mark.parametrize(
    "fail",
    [
        *(f"{what}:{n}" for what in ("compute", "lost") for n in (1, 2, 5)),
        *(f"alloc:{n}" for n in (1, 2, 8, 9)),
        *(f"memory:{n}" for n in (1, 5000, 20_000, 40_000)),
        "init:1",
        "event:1",
    ],
)
def test_a_failure_is_reported_and_leaves_no_harm(machine: Machine, fail: str, split: str) -> None:
    """A failure is reported, everything is freed, and the next run is right."""
    result, said = played(machine, f"order/sched-{split},fail={fail}@1")
    assert result.verdict is Verdict.PASS, result.detail
    assert (said["races"], machine.alive) == ([], 0)
    assert bool(said["reported"]) is (not fail.startswith("event"))


@needs_wheel
def test_a_failure_that_does_not_occur_proves_nothing(machine: Machine) -> None:
    """A build that makes fewer calls cannot run the case, and is no worse than one that makes more."""
    result, said = played(machine, "order/sched-fail=compute:500@1")
    calls = said["calls"]["graph_compute"]
    why = f"fail=compute:500 did not occur, only {calls} calls of it"
    assert (result.verdict, result.detail) == (Verdict.UNSUPPORTED, why)
    fail = Fail("compute", 500)
    passed = Result(*PAIR, Verdict.PASS)
    assert order.judge(passed, fail, {**said, "calls": {}}).verdict is Verdict.VACUOUS
    assert order.judge(passed, fail, {**said, "races": ["a race"]}).verdict is Verdict.FAIL


def test_a_run_without_the_device_is_vacuous() -> None:
    """A scheduler that gives it nothing tests nothing."""
    said = {"races": [], "wrong": "", "reported": "", "failures": 0, "calls": {"synchronize": 3}}
    result = order.judge(Result(*PAIR, Verdict.PASS), Fail(), said)
    assert (result.verdict, result.detail) == (Verdict.VACUOUS, "no device computed anything")


def test_a_failure_that_is_not_reported_fails() -> None:
    """Right numbers do not excuse it."""
    said = {"races": [], "wrong": "", "reported": "", "failures": 1, "calls": {}}
    result = order.judge(Result(*PAIR, Verdict.PASS), Fail("compute", 2), said)
    assert (result.verdict, result.detail) == (Verdict.FAIL, "fail=compute:2: no function of ggml reported it")
    assert order.judge(Result(*PAIR, Verdict.PASS), Fail("alloc", 2), said).verdict is Verdict.PASS


# interfaces and ids


@needs_wheel
def test_another_interface_is_refused_with_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """So is a known number with another layout."""
    library = Library()
    assert interface(library) in INTERFACES
    monkeypatch.setattr(Registry, "api_version", 4)
    with pytest.raises(UnavailableError, match=r"has version 4 of ggml's backend interface, one of 1, 2, 3 expected"):
        Machine(library)
    monkeypatch.setattr(Registry, "api_version", 1)
    with pytest.raises(UnavailableError, match="function tables of version 1 have an unknown layout"):
        Machine(library)


def test_an_exception_in_a_callback_is_kept() -> None:
    """C gets 0, or the status of a failure."""
    callbacks = Callbacks()

    def broken(*_: object) -> int:
        raise ValueError("broken")

    table = callbacks.fill(INTERFACES[0].backend, {"graph_compute": broken, "get_name": broken}, failed=-1)
    rows = {name: (result, arguments) for name, result, arguments in INTERFACES[0].backend}
    for name, expected in (("graph_compute", -1), ("get_name", None)):
        result, arguments = rows[name]
        function = ctypes.CFUNCTYPE(result, *arguments)(getattr(table, name))
        assert function(*[None] * len(arguments)) == expected
    assert [str(e) for e in callbacks.errors] == ["broken", "broken"]


@pytest.mark.parametrize(
    ("case_id", "message"),
    [
        ("order/fly@1", "architecture 'fly' is unknown"),
        ("order/sched-copies=2@1", "copies: 1 or 4 expected, 2 found"),
        ("order/sched-devices=9@1", "devices: 1 to 3 expected"),
        ("order/sched-n=60x60@1", "together up to 64"),
        ("order/sched-lazy=later@1", "first, last, any, joined by"),
        ("order/sched-fail=burn:1@1", "alloc, compute, lost, memory, init, drop, event and :N expected"),
        ("order/sched-fail=alloc@1", "and :N expected, 'alloc' found"),
        ("order/sched-x=1@1", "key 'x' is unknown"),
        ("order/sched-fail=drop:9@1", "fail: drop with the program rpc only expected"),
        ("order/sched-threads=9@1", "threads: 1 to 4 expected, 9 found"),
        ("order/sched-largest=64@1", "largest: 0 or at least 8192 bytes expected, 64 found"),
        ("order/sched-pin=1@1", "pin: reserve of at least each batch expected, 1 found"),
        (
            "order/sched-devices=2,deep=1@1",
            "deep: the program sched on one device that refuses nothing, without side=1, expected, 1 found",
        ),
        ("order/sched-optimize=3@1", "optimize: 0, 1 or 2 expected, 3 found"),
        ("order/sched-do=loads@1", "do: a model's scenario with one part expected, 'loads' found"),
        ("order/llama-do=state-process@1", "do: a model's scenario with one part expected"),
    ],
)
def test_an_invalid_id_is_refused(case_id: str, message: str) -> None:
    """The message says what is legal."""
    with pytest.raises(UsageError, match=message):
        order.FAMILY.build(case_id)


def test_ids_of_all_levels_are_valid() -> None:
    """Each listed id parses, and a level has those of the lower one."""
    full = order.FAMILY.ids("full")
    assert set(order.FAMILY.ids("smoke")) <= set(order.FAMILY.ids("standard"))
    assert len(set(full)) == len(full)
    assert {order.FAMILY.build(i).id for i in full} == set(full)
    assert np.all([i.startswith("order/") for i in full])
