"""One timer for all calls that begin in the same turn of the loop with the same timeout.

A timer per call costs more than the rest of a cheap call, and under load calls begin by the
hundred in one turn. The timer ends with the last of its calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

Expire = Callable[[float], None]


class Deadline:
    """What calls share; each calls `leave` once, however it ends."""

    __slots__ = ("_expire", "_left", "_timeout", "_timer")

    def __init__(self, loop: asyncio.AbstractEventLoop, timeout: float) -> None:
        self._timeout = timeout
        self._expire: list[Expire] = []
        self._left = 0
        self._timer = loop.call_later(timeout, self._fire)

    def enter(self, expire: Expire) -> None:
        self._expire.append(expire)
        self._left += 1

    def leave(self) -> None:
        self._left -= 1
        if self._left == 0:
            self._timer.cancel()
            self._expire.clear()

    def _fire(self) -> None:
        for expire in list(self._expire):
            expire(self._timeout)


class Deadlines:
    """The deadlines that calls of this turn still join."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._open: dict[float, Deadline] = {}

    def enter(self, timeout: float, expire: Expire) -> Deadline:
        """Has `expire` called with the timeout after so many seconds, unless all have left."""
        deadline = self._open.get(timeout)
        if deadline is None:
            if not self._open:
                self._loop.call_soon(self._open.clear)
            deadline = self._open[timeout] = Deadline(self._loop, timeout)
        deadline.enter(expire)
        return deadline
