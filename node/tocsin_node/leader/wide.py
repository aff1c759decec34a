"""Carries wide changes through, a bounded piece at a time, on the leader alone.

Owns the walk: which names a change is about, and when it is over. What a step does its command
says, and the state machine checks it (core/wide.py, which tells how to add a kind of change). A
new leader goes on from the cursor in the state; a step that was taken already changes nothing.

A piece is proposed when the one before it has been applied, so that a change of many jobs leaves
room for everything else. Jobs that come due before the walk reaches them are replanned by the
ticker.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from tocsin_node import planner
from tocsin_node.core import wide
from tocsin_node.core.command import AdvanceWide, Command, EndWide
from tocsin_node.core.model import WideChange, WideKind
from tocsin_node.core.result import Reason, Rejected
from tocsin_node.core.state import State
from tocsin_node.leader.wake import RETRY_MS, SLEEP_MS_MAX, Wake, repeat
from tocsin_node.replica import Changes, Replica

PIECE_MAX = 200  # names that one piece deals with: applying it is one step of the event loop
PIECE_DECISIONS_MAX = 1_000  # occurrences that the steps of one piece settle, but for the last step
SLICE_MS = 4  # planning between two turns of the event loop
SCAN_NAMES = 5_000  # looked at between two turns of the event loop

log = logging.getLogger(__name__)


class Walk:
    """What one kind of change is about.

    Args:
        names: all names that a change may be about, in any order; asked once by each leader, so
            what is added later must be as the change wants it already.
        step: the next command about one name at an instant; None: it is dealt with.
        weight: how much of a piece a command takes, in decided occurrences.
    """

    def __init__(
        self,
        names: Callable[[State, WideChange], Iterable[str]],
        step: Callable[[State, WideChange, str, int], Command | None],
        weight: Callable[[Command], int] = lambda command: 1,
    ) -> None:
        self.names = names
        self.step = step
        self.weight = weight


class Wide:
    """The wide changes of one replica while its node leads, the oldest first.

    Args:
        may_plan_zones: whether this node's time zone database is as new as the cluster's; one that
            is not plans nothing.
    """

    def __init__(
        self, replica: Replica, *, may_plan_zones: Callable[[], bool] = lambda: True
    ) -> None:
        self._replica = replica
        self._may_plan_zones = may_plan_zones
        self._wake = Wake()
        self._loop: asyncio.Task[None] | None = None
        self._walked = 0  # id of the change whose names are being walked through
        self._names: Iterator[str] = iter(())
        self._cursor = ""  # all up to here are dealt with, and the log does not say so yet
        replica.subscribe(self._on_changes)

    def start(self, term: int) -> None:
        """Goes on with what the state says is not over."""
        assert self._loop is None, f"term {term} began before the last one was over"
        self._walked = 0
        self._loop = asyncio.ensure_future(repeat(self._pass, "wide changes"))

    async def stop(self) -> None:
        """Ends at once; a piece that is on its way may still be applied."""
        if self._loop is None:
            return
        loop, self._loop = self._loop, None
        loop.cancel()
        await asyncio.gather(loop, return_exceptions=True)

    def _on_changes(self, changes: Changes) -> None:
        if self._loop is not None and changes.wide:
            self._wake.set()

    async def _pass(self) -> None:
        """One piece of the oldest change, or sleeps until there is one."""
        active = self._replica.state.wide_active.values()
        change = next((each for each in active if each.kind in WALKS), None)
        if change is None:
            await self._wake.wait(None)
            return
        if not self._replica.clock.is_known or not self._may_plan_zones():
            await self._wake.wait(SLEEP_MS_MAX)
            return
        try:
            await self._piece(change)
        except BaseException:
            self._walked = 0  # what was taken is looked at again
            raise

    async def _piece(self, change: WideChange) -> None:
        names = await self._next_names(change)
        if not names:
            await self._replica.execute_many([EndWide(change.id)], reserved=True)
            log.info("wide change %d (%s %s) is over", change.id, change.kind, change.subject)
            return
        await self._deal_with(change, names)
        self._cursor = names[-1]  # goes into the log with the next piece

    async def _next_names(self, change: WideChange) -> list[str]:
        """The first names after those that were taken last, in order."""
        if self._walked != change.id:
            self._names, self._cursor = await self._in_order(change), ""
            self._walked = change.id
        return list(islice(self._names, PIECE_MAX))

    async def _in_order(self, change: WideChange) -> Iterator[str]:
        """The names after the cursor, put in order a bounded number at a time."""
        names = list(WALKS[change.kind].names(self._replica.state, change))
        sorted_parts = []
        for at in range(0, len(names), SCAN_NAMES):
            later = (name for name in names[at : at + SCAN_NAMES] if name > change.cursor)
            sorted_parts.append(sorted(later))
            await asyncio.sleep(0)
        return heapq.merge(*sorted_parts)

    async def _deal_with(self, change: WideChange, names: list[str]) -> None:
        """Takes steps until none of the names needs another one."""
        left: list[str] = names
        while left:
            batch, left = await self._plan(change, left)
            if batch:
                commands: list[Command] = list(batch.values())
                if self._cursor:
                    commands.append(AdvanceWide(change.id, self._cursor))
                results = await self._replica.execute_many(commands, reserved=True)
                self._cursor = ""
                left = [*batch, *left]
                if self._refused(change, results):
                    await asyncio.sleep(RETRY_MS / 1_000)

    async def _plan(
        self, change: WideChange, names: list[str]
    ) -> tuple[dict[str, Command], list[str]]:
        """The next step for each of the first names, and the names that are left for later."""
        walk, clock = WALKS[change.kind], self._replica.clock
        batch: dict[str, Command] = {}
        weight = 0
        began_ms = clock.elapsed_ms()
        waiting = iter(names)
        for name in waiting:
            command = self._step(walk, change, name)
            if command is not None:
                batch[name] = command
                weight += walk.weight(command)
                if weight >= PIECE_DECISIONS_MAX:
                    break
            if clock.elapsed_ms() - began_ms >= SLICE_MS:
                await asyncio.sleep(0)
                began_ms = clock.elapsed_ms()
        return batch, list(islice(waiting, None))

    def _step(self, walk: Walk, change: WideChange, name: str) -> Command | None:
        """The next step for one name; what cannot be planned must not keep the others waiting."""
        try:
            return walk.step(self._replica.state, change, name, self._replica.clock.now_ms())
        except Exception:
            log.exception("%s cannot be reached by wide change %d; left alone", name, change.id)
            return None

    def _refused(self, change: WideChange, results: Iterable[object]) -> bool:
        """Whether a step was refused that should not have been."""
        found = [
            result
            for result in results
            if isinstance(result, Rejected) and result.reason not in _MOVED
        ]
        for result in found:
            log.error("a step of wide change %d was refused: %s", change.id, result.message)
        return bool(found)


# The job was changed, deleted or reached by somebody else: the next look tells.
_MOVED = frozenset({Reason.STALE_PLAN, Reason.JOB_NOT_FOUND})


def _calendar_jobs(state: State, change: WideChange) -> Iterable[str]:
    return state.calendar_jobs.get(change.subject, ())


def _replan(state: State, change: WideChange, name: str, now_ms: int) -> Command | None:
    """The next step for a job that this change, or an older one, is still to reach."""
    job = state.job(name)
    held_by = None if job is None else wide.holding(state, job)
    if job is None or held_by is None or held_by.id > change.id:
        return None
    return planner.replan(state, job, now_ms)


def _decided(command: Command) -> int:
    return 1 + len(getattr(command, "decisions", ()))


def _all_jobs(state: State, change: WideChange) -> Iterable[str]:
    return state.jobs


WALKS: dict[WideKind, Walk] = {
    WideKind.CALENDAR: Walk(_calendar_jobs, _replan, _decided),
    WideKind.TZDATA: Walk(_all_jobs, _replan, _decided),
}
