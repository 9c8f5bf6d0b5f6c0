"""A time limit for a backend in this process.

One thread checks the time. It interrupts a late request of the main thread, on POSIX by a signal whose handler raises
in the running Python code, so that a loop costs its case and the run goes on. Where C code does not return to Python,
or the request is another thread's, it ends the process after a further grace: it says what the process was doing, lets
the run write what it has, and exits with `HUNG`. C code that never releases the GIL stops this thread too.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from math import inf
from types import FrameType
from typing import Any, ParamSpec, TypeVar

from conformance.ggml.errors import BackendTimeoutError
from conformance.judge.outcome import Exit

HUNG = int(Exit.HUNG)
"""Exit code of a process whose backend did not return."""
GRACE = 10.0
"""Seconds, at least, that C code gets after its time limit to return to Python."""
LOOK = 1.0
"""Seconds, at most, between two looks; an interrupt is repeated at each, as an adapter may catch it."""
KNOCK: Any = getattr(signal, "SIGALRM", None)
"""The signal that interrupts the main thread; None on a system without: there a hung case ends the run."""

P = ParamSpec("P")
T = TypeVar("T")


class _Alarm:
    """This process's handler of SIGALRM while a watchdog needs it.

    An alarm that no watchdog knocked goes to the handler that was there before. Where there was none it is dropped: a
    knock that comes late looks the same and must not end the process.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        """Held while a watchdog knocks and while the handler changes: no knock may meet another handler."""
        self._users: list[Watchdog] = []
        self._before: Any = signal.SIG_DFL

    @property
    def rings(self) -> bool:
        """Whether a knock would come here: an adapter may have put a handler of its own in its place."""
        return signal.getsignal(KNOCK) == self._ring

    def take(self, user: Watchdog) -> None:
        """Ring for `user`; in the main thread."""
        with self.lock:
            if not self.rings:
                self._before = signal.signal(KNOCK, self._ring) or signal.SIG_DFL
            if user not in self._users:
                self._users.append(user)

    def leave(self, user: Watchdog) -> None:
        """Ring no more for `user`; in the main thread."""
        with self.lock:
            self._users.remove(user)
            if not self._users and self.rings:
                signal.signal(KNOCK, self._before)

    def _ring(self, number: int, frame: FrameType | None) -> None:
        knocked = [user for user in self._users if user.knocked]
        for user in knocked:
            user.answer()
        if not knocked and callable(self._before):
            self._before(number, frame)


_ALARM = _Alarm()


class Watchdog:
    """Watches one request at a time; a request within another is part of it.

    Args:
        seconds: that a request may take.
        on_hang: called in a thread of its own, with a sentence, before the process is ended.
    """

    def __init__(self, seconds: float, on_hang: Callable[[str], None] | None = None) -> None:
        self._seconds = seconds
        self.bound = inf
        """Seconds after which a request is interrupted, where they are fewer."""
        self._on_hang = on_hang
        self._doing = ""
        self._limit = seconds
        """Of the present request."""
        self._deadline: float | None = None
        self._watched: int | None = None
        """The thread of the request, where a signal reaches it."""
        self.knocked = False
        """Whether a signal is on its way to the request."""
        self._thread: threading.Thread | None = None
        self._over = threading.Event()

    def run(self, doing: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a backend's `function` within the limit; `doing` names the backend and the request.

        Raises:
            BackendTimeoutError: it took longer.
        """
        if self._doing:
            return function(*args, **kwargs)
        if self._thread is None:
            self._thread = threading.Thread(target=self._look, name="hang", daemon=True)
            self._thread.start()
        if self._watched is None or not _ALARM.rings:
            self._install()
        self._limit = min(self._seconds, self.bound)
        self._doing, self._deadline = doing, time.monotonic() + self._limit
        try:
            return function(*args, **kwargs)
        finally:
            self._deadline, self._doing = None, ""

    def rest(self) -> None:
        """Give the signal back to its former handler until the next request."""
        if self._watched is not None and threading.current_thread() is threading.main_thread():
            _ALARM.leave(self)
            self._watched = None

    def close(self) -> None:
        """Watch no more."""
        self.rest()
        self._over.set()

    def answer(self) -> None:
        """Interrupt the request that is late; in its thread.

        Raises:
            BackendTimeoutError: it is.
        """
        self.knocked = False
        if self._late(0.0):
            raise BackendTimeoutError(f"{self._doing}: no answer within {self._limit:g} s", words="no answer")

    def _install(self) -> None:
        if KNOCK is not None and threading.current_thread() is threading.main_thread():
            _ALARM.take(self)
            self._watched = threading.get_ident()

    def _late(self, grace: float) -> bool:
        deadline = self._deadline
        return deadline is not None and time.monotonic() > deadline + grace

    def _look(self) -> None:
        while not self._over.wait(min(self._seconds / 4, LOOK)):
            if self._late(self._seconds - self._limit + max(self._seconds, GRACE)):  # a bound ends no process earlier
                self._end()
            else:
                with _ALARM.lock:
                    if sys.platform != "win32" and self._late(0.0) and self._watched is not None and _ALARM.rings:
                        self.knocked = True
                        signal.pthread_kill(self._watched, KNOCK)

    def _end(self) -> None:
        sentence = (
            f"{self._doing}: no answer within {self._seconds:g} s, and none to an interrupt, so the run ends here; "
            "with --isolate it would have cost this case only"
        )
        with suppress(Exception):
            os.write(2, f"conform: {sentence}\n".encode(errors="replace"))
        with suppress(Exception):
            if self._on_hang is not None:
                self._on_hang(sentence)
        with suppress(Exception):
            sys.stdout.flush()
        os._exit(HUNG)
