"""Raises the alerts of jobs that have not succeeded in time; logs these, their ends, dead letters,
and events that a subscription had no room for.

Owns when to look. Refuses to judge: core/watch.py does, from the replicated state, so it makes no
difference who leads, or whether a worker ever came. An alert that is raised twice is one.
"""

from __future__ import annotations

import asyncio
import logging

from tocsin_node.core.command import RaiseAlert
from tocsin_node.core.model import RunState
from tocsin_node.core.result import Reason, Rejected
from tocsin_node.leader.wake import SLEEP_MS_MAX, Wake, repeat
from tocsin_node.replica import Changes, Replica

BATCH_MAX = 1_000
TOLD_MAX = 10  # dead letters of one entry that the log names
NOT_DUE_MS = 50  # the entry was stamped before the look: hardly ever, and soon over

log = logging.getLogger(__name__)


class Watchdog:
    """The dead-man's switches of one replica while its node leads."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._wake = Wake()
        self._loop: asyncio.Task[None] | None = None
        self._alerted: dict[str, None] = {}  # jobs of whose alert's end nobody has told
        self._dropped: dict[str, int] = {}  # events that were dropped when the log told of it
        replica.subscribe(self._on_changes)

    def start(self, term: int) -> None:
        assert self._loop is None, f"term {term} began before the last one was over"
        self._alerted = dict.fromkeys(self._replica.state.alerted)
        self._dropped.clear()
        self._loop = asyncio.ensure_future(repeat(self._pass, "watchdog"))

    async def stop(self) -> None:
        """Ends at once; an alert that is on its way may still be raised."""
        if self._loop is None:
            return
        loop, self._loop = self._loop, None
        loop.cancel()
        await asyncio.gather(loop, return_exceptions=True)

    def look(self) -> None:
        """Looks at once: the clock was set, and no timer says so."""
        self._wake.set()

    def _on_changes(self, changes: Changes) -> None:
        if self._loop is None:
            return
        if changes.jobs:
            self._wake.set()
            self._tell_of_ends(changes)
            self._tell_of_dropped(changes)
        runs, index = self._replica.state.runs, changes.index
        dead = [
            run
            for run in map(runs.get, changes.runs)
            if run is not None and run.state is RunState.FAILED and run.end_index == index
        ]
        for run in dead[:TOLD_MAX]:
            log.warning("dead letter: run %s failed for good: %s", run.name, run.reason)
        if len(dead) > TOLD_MAX:
            log.warning("dead letters: %d more runs failed for good", len(dead) - TOLD_MAX)

    def _tell_of_ends(self, changes: Changes) -> None:
        """Logs the alerts that are over."""
        jobs, alerted = self._replica.state.jobs, self._replica.state.alerted
        for name in changes.jobs:
            if name in alerted:
                self._alerted[name] = None
            elif name in self._alerted:
                del self._alerted[name]
                why = "all is well again" if name in jobs else "the job was deleted"
                log.warning("alert over: job %s: %s", name, why)

    def _tell_of_dropped(self, changes: Changes) -> None:
        """Logs that a subscription drops events: at first, and whenever they have doubled."""
        for name in changes.jobs:
            dropped = self._replica.state.dropped_events.get(name)
            if dropped is None or dropped.index != changes.index:
                continue
            if dropped.count >= 2 * self._dropped.get(name, 0):
                self._dropped[name] = dropped.count
                log.warning(
                    "events dropped: subscription %s has no room, %d so far", name, dropped.count
                )

    async def _pass(self) -> None:
        """Raises what is due now, or sleeps until something may be."""
        state, now_ms = self._replica.state, self._replica.clock.now_ms()
        late = state.late_jobs(now_ms, BATCH_MAX)
        if not late:
            next_ms = state.next_alert_ms()
            # Cluster time may be set forward, and no timer tells.
            await self._wake.wait(None if next_ms is None else min(next_ms - now_ms, SLEEP_MS_MAX))
            return
        results = await self._replica.execute_many(
            [RaiseAlert(job.name, job.uid) for job in late], reserved=True
        )
        for job, result in zip(late, results, strict=True):
            if not isinstance(result, Rejected):
                within_s = job.template.must_succeed_within_ms / 1_000
                log.warning("alert: job %s has not succeeded within %g s", job.name, within_s)
            elif result.reason is Reason.NOT_DUE:
                await asyncio.sleep(NOT_DUE_MS / 1_000)
