"""How a leader loop sleeps: until somebody wakes it, or until an instant it named.

Owns the waiting and what happens when a pass fails. Refuses to know what a pass does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from tocsin_node.raft.errors import RaftError

# Cluster time may be set forward while a loop sleeps towards an instant of it; no timer tells.
SLEEP_MS_MAX = 2_000
RETRY_MS = 200  # after the Raft layer refused or left an outcome open
AFTER_BUG_MS = 1_000

log = logging.getLogger(__name__)


class Wake:
    """An event with a timer, for one waiting task."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def set(self) -> None:
        self._event.set()

    async def wait(self, timeout_ms: float | None) -> None:
        """Returns once set, or after a time; None: only when set. What was set is then used up."""
        timer = None
        if timeout_ms is not None:
            loop = asyncio.get_running_loop()
            timer = loop.call_later(max(timeout_ms, 0) / 1_000, self._event.set)
        try:
            await self._event.wait()
        finally:
            if timer is not None:
                timer.cancel()
        self._event.clear()


async def repeat(one_pass: Callable[[], Awaitable[None]], name: str) -> None:
    """Runs passes until cancelled. A pass that fails is repeated: each begins from the state."""
    while True:
        try:
            await one_pass()
        except RaftError as error:
            log.info("%s: %s; trying again", name, error)
            await asyncio.sleep(RETRY_MS / 1_000)
        except Exception:
            log.exception("%s: a pass failed, which is a bug; trying again", name)
            await asyncio.sleep(AFTER_BUG_MS / 1_000)


class Tasks:
    """The tasks of one loop: kept alive while they run, cancelled together.

    Args:
        wake: set when a task has ended and no longer counts, for a loop that waits for room.
    """

    def __init__(self, wake: Wake | None = None) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._wake = wake

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, work: Awaitable[None], name: str) -> None:
        task = asyncio.ensure_future(_logged(work, name))
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if self._wake is not None:
            self._wake.set()

    async def cancel(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task


async def _logged(work: Awaitable[None], name: str) -> None:
    try:
        await work
    except Exception:
        log.exception("%s failed, which is a bug", name)
