"""A watchdog interrupts what is late, and nothing else: neither its own process nor other handlers of SIGALRM."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator

import pytest

from conformance.ggml.errors import BackendTimeoutError
from conformance.run.isolation import watchdog as module
from conformance.run.isolation.watchdog import Watchdog

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no signal reaches a thread there")


@pytest.fixture(autouse=True)
def _no_other_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """A runner that lives as long as this process, as `properties` has one, is no user of the handler here."""
    monkeypatch.setattr(module, "_ALARM", module._Alarm())


@pytest.fixture
def watchdog() -> Iterator[Watchdog]:
    """One with a short limit."""
    it = Watchdog(0.2)
    yield it
    it.close()


@pytest.fixture
def alarms() -> Iterator[list[int]]:
    """Alarms that reach a handler of somebody else, there before any watchdog."""
    heard: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, _: heard.append(number))
    yield heard
    signal.signal(signal.SIGALRM, before)


def _loop() -> None:
    while True:
        pass


def test_a_loop_is_interrupted_by_its_limit(watchdog: Watchdog) -> None:
    """The error names what the process was doing and the limit."""
    with pytest.raises(BackendTimeoutError, match=r"^b: compute: no answer within 0\.2 s$"):
        watchdog.run("b: compute", _loop)


def test_the_former_handler_comes_back_with_the_last_rest(alarms: list[int]) -> None:
    """Two watchdogs use one handler; whoever rests last gives it back."""
    a, b = Watchdog(9.0), Watchdog(9.0)
    former = signal.getsignal(signal.SIGALRM)
    a.run("a", int)
    b.run("b", int)
    a.rest()
    assert signal.getsignal(signal.SIGALRM) != former
    b.close()
    a.close()
    assert signal.getsignal(signal.SIGALRM) is former
    assert not alarms


def test_two_watchdogs_interrupt_their_own_requests(watchdog: Watchdog) -> None:
    """One that waits for its next request is in nobody's way."""
    other = Watchdog(0.2)
    other.run("other", int)
    for it, name in ((watchdog, "one"), (other, "other")):
        with pytest.raises(BackendTimeoutError, match=rf"^{name}: "):
            it.run(name, _loop)
    other.close()


def test_somebody_elses_alarm_reaches_its_handler(alarms: list[int], watchdog: Watchdog) -> None:
    """An alarm that no watchdog knocked is passed on."""
    watchdog.run("b", signal.raise_signal, signal.SIGALRM)
    assert alarms == [signal.SIGALRM]


def test_a_late_knock_does_not_end_the_process(watchdog: Watchdog) -> None:
    """A knock that comes when its request is over meets no default handler."""
    before = signal.signal(signal.SIGALRM, signal.SIG_DFL)
    try:
        watchdog.run("b", int)
        signal.raise_signal(signal.SIGALRM)
    finally:
        watchdog.rest()
        signal.signal(signal.SIGALRM, before)


def test_an_adapters_own_handler_is_not_knocked(alarms: list[int], watchdog: Watchdog) -> None:
    """A request that takes the signal away is not interrupted by it; the next request is watched again."""

    def take_it() -> None:
        signal.signal(signal.SIGALRM, signal.SIG_IGN)

    watchdog.run("b: open", take_it)
    with pytest.raises(BackendTimeoutError, match=r"^b: compute"):
        watchdog.run("b: compute", _loop)
    assert not alarms
