"""A simulated machine: its clock moves only when something is measured, and its noise is always the same."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from conformance.perf.measure import Rounds, Subject


@dataclass(frozen=True)
class Noise:
    """What disturbs a measurement, each as strong as told; none of it by default."""

    own: float = 0.0
    """Standard deviation of each measurement's own error, of the logarithm."""
    wander: float = 0.0
    """Of the step of a machine-wide slowness that forgets 1 % per measurement."""
    bursts: float = 0.0
    """How much slower a burst makes it on average; bursts last 20 to 400 measurements."""
    modes: float = 0.0
    """How much slower the slow one of two modes is, which 40 % of measurements find."""
    drift: float = 0.0
    """How much slower everything has become after 90 s."""
    order: float = 0.0
    """How much slower a subject is that does not follow itself."""
    luck: float = 0.0
    """Scale of what a life costs for as long as it lives: Student's t of 3 degrees of freedom."""


CALM = Noise(own=0.02, wander=0.01, luck=0.005, order=0.05)
WORST = Noise(own=0.05, wander=0.02, bursts=0.8, drift=1.0, order=0.1, luck=0.02)


class Machine:
    """A clock, and subjects that take their time by it.

    Args:
        seed: of its noise.
        noise: how much of which.
        opening: seconds to start a subject.
    """

    def __init__(self, seed: int = 0, noise: Noise = CALM, opening: float = 0.4) -> None:
        self.noise, self.opening = noise, opening
        self.now = 0.0
        self._rng = np.random.default_rng(seed)
        self._slow = 0.0
        self._burst = 0
        self._last = ""
        self._luck: dict[str, float] = {}

    def clock(self) -> float:
        """Seconds since it was made."""
        return self.now

    def subject(self, name: str, seconds: float = 0.004, waste: float = 3.0) -> Subject:
        """Something that takes `seconds`, and passes `waste` times as much of the clock."""

        def renew() -> None:
            self.now += self.opening
            self._luck[name] = self.noise.luck * self._rng.standard_t(3)

        def run() -> float:
            taken = seconds * float(np.exp(self._luck.get(name, 0.0))) * self._disturbed(name)
            self.now += waste * taken
            return taken

        renew()
        self.now = 0.0
        return Subject(name, run, renew)

    def rounds(self, head: float = 1.0) -> Rounds:
        """`base`, and `head` that takes `head` times as long."""
        return Rounds([self.subject("base"), self.subject("head", 0.004 * head)], clock=self.clock)

    def _disturbed(self, name: str) -> float:
        rng, noise = self._rng, self.noise
        self._slow = 0.99 * self._slow + noise.wander * rng.normal()
        factor = float(np.exp(self._slow + noise.own * rng.normal())) * (1 + noise.drift * self.now / 90)
        if noise.bursts:
            if self._burst == 0 and rng.random() < 0.005:
                self._burst = int(rng.integers(20, 400))
            if self._burst:
                self._burst -= 1
                factor *= 1 + noise.bursts * rng.exponential()
        if noise.modes and rng.random() < 0.4:
            factor *= 1 + noise.modes
        if name != self._last:
            factor *= 1 + noise.order
        self._last = name
        return factor
