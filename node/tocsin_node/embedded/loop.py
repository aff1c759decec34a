"""An event loop whose owner decides how its time passes.

Owns the waiting: whenever nothing is left to do, it asks whether time is to be skipped, or really
waited for. Refuses to know what is waited for.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable

from tocsin_node.clock import HostClock

# Seconds until the next timer, None if there is none, to the seconds that pass at once; None: wait.
Idle = Callable[[float | None], float | None]

TURN_S = 1e-6  # that a turn of the loop takes: else who waits for almost nothing waits for ever


class _AskingSelector(selectors.DefaultSelector):
    loop: SteppedLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or (timeout is not None and timeout <= 0):
            self.loop.pass_time(self.loop.turn_s)
            return ready
        skipped = self.loop.idle(timeout)
        if skipped is not None:
            self.loop.pass_time(skipped)
            return []
        return self.loop.wait_really(lambda: super(_AskingSelector, self).select(timeout))


class SteppedLoop(asyncio.SelectorEventLoop):
    """Its time all but stands still while it works; when it is idle, `idle` says what happens.

    Attributes:
        now: its time, in seconds.
    """

    def __init__(self, idle: Idle, *, turn_s: float = TURN_S) -> None:
        self.now = 0.0
        self.idle = idle
        self.turn_s = turn_s
        self._host = HostClock()
        selector = _AskingSelector()
        super().__init__(selector)
        selector.loop = self

    def time(self) -> float:
        return self.now

    def pass_time(self, seconds: float) -> None:
        """Lets time pass in which nothing runs; timers that it passes are due together."""
        self.now += seconds

    def wait_really(
        self, select: Callable[[], list[tuple[selectors.SelectorKey, int]]]
    ) -> list[tuple[selectors.SelectorKey, int]]:
        """Waits as any loop does; the loop's time passes with the machine's."""
        began_ms = self._host.elapsed_ms()
        ready = select()
        self.now += (self._host.elapsed_ms() - began_ms) / 1_000
        return ready
