"""Ends runs that did not start by their deadline, on the leader alone.

Owns when a run is looked at. Refuses to judge: core/lease.py knows the deadline, and the state
machine refuses to end a run that was granted in the meantime. What is waited for is kept in memory
and found again from the state by the next leader.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections.abc import Iterator
from itertools import islice

from tocsin_node.core import lease as rules
from tocsin_node.core.command import Lapse
from tocsin_node.core.model import RunState
from tocsin_node.core.result import Reason, Rejected
from tocsin_node.leader.wake import RETRY_MS, SLEEP_MS_MAX, Tasks, Wake, repeat
from tocsin_node.raft.errors import RaftError
from tocsin_node.replica import Changes, Replica

BATCH_MAX = 1_000
INHERITED_MAX = 500  # runs that waited before this leader, looked at in one step

# The run was granted, ended, or came to cover a further occurrence: all is well.
_MOVED = frozenset({Reason.RUN_NOT_FOUND, Reason.NOT_READY, Reason.NOT_DUE})

log = logging.getLogger(__name__)


class Deadlines:
    """The start deadlines of one replica's runs while its node leads."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._wake = Wake()
        self._tasks = Tasks()
        self._loop: asyncio.Task[None] | None = None
        self._due: list[tuple[int, str]] = []  # heap; may hold runs that have started
        self._inherited: Iterator[str] | None = None  # waiting since before this leader
        self._ending: set[str] = set()  # runs whose end is on its way; asked, never walked through
        replica.subscribe(self._on_changes)

    def start(self, term: int) -> None:
        """Begins with the runs that wait in the state."""
        assert self._loop is None, f"term {term} began before the last one was over"
        self._due.clear()
        self._ending.clear()
        # Looked at in slices; a run that changes before its turn comes is watched for its change.
        self._inherited = iter(list(self._replica.state.waiting))
        self._loop = asyncio.ensure_future(repeat(self._pass, "deadlines"))

    async def stop(self) -> None:
        """Ends at once; what is on its way may still be applied."""
        if self._loop is None:
            return
        loop, self._loop = self._loop, None
        loop.cancel()
        await asyncio.gather(loop, return_exceptions=True)
        await self._tasks.cancel()
        self._inherited = None

    def look(self) -> None:
        """Looks at once: the clock was set, and no timer says so."""
        self._wake.set()

    def _on_changes(self, changes: Changes) -> None:
        if self._loop is not None:
            runs = self._replica.state.runs
            for name in changes.runs:
                run = runs.get(name)
                if run is not None and run.state is RunState.PENDING and not run.last_token:
                    self._watch(name)

    def _watch(self, name: str) -> None:
        state = self._replica.state
        run = state.runs.get(name)
        deadline_ms = None if run is None else rules.deadline_ms(state, run)
        if deadline_ms is not None:
            heapq.heappush(self._due, (deadline_ms, name))
            if self._due[0] == (deadline_ms, name):
                self._wake.set()

    async def _pass(self) -> None:
        """Proposes the end of what is overdue, or sleeps until something may be."""
        if self._inherited is not None:
            names = list(islice(self._inherited, INHERITED_MAX))
            if not names:
                self._inherited = None
            for name in names:
                self._watch(name)
            await asyncio.sleep(0)
            return
        batch = self._overdue()
        if batch:
            self._ending.update(batch)
            self._tasks.spawn(self._end(batch), "the end of runs that did not start")
            await asyncio.sleep(0)
            return
        sleep_ms = None
        if self._due:
            sleep_ms = self._due[0][0] + 1 - self._replica.clock.now_ms()
            sleep_ms = max(1, min(sleep_ms, SLEEP_MS_MAX))
        await self._wake.wait(sleep_ms)

    def _overdue(self) -> list[str]:
        state, now_ms = self._replica.state, self._replica.clock.now_ms()
        found: dict[str, None] = {}
        while self._due and self._due[0][0] < now_ms and len(found) < BATCH_MAX:
            _, name = heapq.heappop(self._due)
            run = state.runs.get(name)
            late = run is not None and rules.past_deadline(state, run, now_ms=now_ms)
            if late and name not in self._ending:
                found[name] = None
        return list(found)

    async def _end(self, names: list[str]) -> None:
        try:
            results = await self._replica.execute_many([Lapse(n) for n in names], reserved=True)
            for name, result in zip(names, results, strict=True):
                if isinstance(result, Rejected) and result.reason not in _MOVED:
                    log.error("ending %s, which did not start, was refused: %s", name, result)
        except RaftError as error:
            log.info("the end of %d runs is open: %s", len(names), error)
            await asyncio.sleep(RETRY_MS / 1_000)
        finally:
            self._ending.difference_update(names)
            for name in names:
                self._watch(name)
            self._wake.set()
