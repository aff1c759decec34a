"""Cancels what a deleted job has left behind, on the leader alone.

The entry that deletes a job cancels only so many runs; the others no longer start, and are ended
here in slices. What is left to do follows from the state, so the next leader goes on with it.
"""

from __future__ import annotations

import asyncio
import logging
from itertools import islice

from tocsin_node.core.command import CancelDeleted
from tocsin_node.core.machine import DELETED_RUNS_MAX
from tocsin_node.core.model import FINAL_STATES, Job
from tocsin_node.core.result import Reason, Rejected
from tocsin_node.leader.wake import Wake, repeat
from tocsin_node.replica import Changes, Replica

log = logging.getLogger(__name__)


class Undertaker:
    """The deleted jobs of one replica while its node leads."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._wake = Wake()
        self._loop: asyncio.Task[None] | None = None
        replica.subscribe(self._on_changes)

    def start(self, term: int) -> None:
        assert self._loop is None, f"term {term} began before the last one was over"
        self._loop = asyncio.ensure_future(repeat(self._pass, "undertaker"))

    async def stop(self) -> None:
        """Ends at once; what is on its way may still be applied."""
        if self._loop is None:
            return
        loop, self._loop = self._loop, None
        loop.cancel()
        await asyncio.gather(loop, return_exceptions=True)

    def _on_changes(self, changes: Changes) -> None:
        if self._loop is not None and changes.jobs and self._replica.state.tombstones:
            self._wake.set()

    async def _pass(self) -> None:
        """Cancels one slice of each deleted job, or sleeps until one is deleted."""
        state = self._replica.state
        slices = [self._slice(state.jobs[name]) for name in list(state.tombstones)]
        found = [command for command in slices if command.names]
        if not found:
            await self._wake.wait(None)
            return
        for command in found:
            (result,) = await self._replica.execute_many([command], reserved=True)
            if isinstance(result, Rejected) and result.reason is not Reason.JOB_NOT_FOUND:
                log.error("what job %s left was not cancelled: %s", command.job, result.message)

    def _slice(self, job: Job) -> CancelDeleted:
        runs = self._replica.state.runs
        names = self._replica.state.runs_by_job.get(job.name, ())
        left = (
            name
            for name in names
            if runs[name].state not in FINAL_STATES and not runs[name].cancel_requested
        )
        return CancelDeleted(job.name, job.uid, tuple(islice(left, DELETED_RUNS_MAX)))
