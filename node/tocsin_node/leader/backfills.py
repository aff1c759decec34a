"""Carries backfills through, on the leader alone: makes their runs as earlier ones end.

What is left to do follows from the state, so the next leader goes on with it. A backfill of which
no more runs may be made waits for one of them to end, and holds up nothing else.
"""

from __future__ import annotations

import asyncio
import logging

from tocsin_node.backfill import piece
from tocsin_node.core import backfill as rules
from tocsin_node.core.backfill import Order
from tocsin_node.core.command import Command, EndBackfill, RequestKey
from tocsin_node.core.model import WideChange, WideKind
from tocsin_node.core.result import Reason, Rejected
from tocsin_node.leader.wake import RETRY_MS, Wake, repeat
from tocsin_node.replica import Changes, Replica

_OWN = RequestKey("", b"")
# Something came in between: the next look tells.
_MOVED = frozenset({Reason.STALE_PLAN, Reason.JOB_NOT_FOUND, Reason.BLOCKED, Reason.QUOTA_EXCEEDED})

log = logging.getLogger(__name__)


class Backfills:
    """The backfills of one replica while its node leads."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._wake = Wake()
        self._loop: asyncio.Task[None] | None = None
        replica.subscribe(self._on_changes)

    def start(self, term: int) -> None:
        assert self._loop is None, f"term {term} began before the last one was over"
        self._loop = asyncio.ensure_future(repeat(self._pass, "backfills"))

    async def stop(self) -> None:
        """Ends at once; what is on its way may still be applied."""
        if self._loop is None:
            return
        loop, self._loop = self._loop, None
        loop.cancel()
        await asyncio.gather(loop, return_exceptions=True)

    def _on_changes(self, changes: Changes) -> None:
        # Also a run that ended, or a job that was deleted.
        if self._loop is not None and self._replica.state.wide_active:
            self._wake.set()

    async def _pass(self) -> None:
        """One piece of each backfill that has room for it, or sleeps until something changes."""
        took = False
        for change in list(self._replica.state.wide_active.values()):
            if change.kind is not WideKind.BACKFILL:
                continue
            command = self._next(change)
            if command is not None:
                took = True
                (result,) = await self._replica.execute_many([command], reserved=True)
                await self._note(change, result)
            await asyncio.sleep(0)  # a piece at a time between other work
        if not took:
            await self._wake.wait(None)

    async def _note(self, change: WideChange, result: object) -> None:
        if not isinstance(result, Rejected):
            return
        if result.reason not in _MOVED:
            log.error("a step of backfill %d was refused: %s", change.id, result.message)
        await asyncio.sleep(RETRY_MS / 1_000)

    def _next(self, change: WideChange) -> Command | None:
        """The next step of a backfill; None: it waits for runs to end."""
        state, order = self._replica.state, Order.read(change.subject)
        if change.id not in state.wide_active:
            return None
        job = state.job(order.job)
        if job is None or job.uid > change.id:
            return EndBackfill(_OWN, change.id, cancelled=True)
        room = order.at_once - len(rules.unfinished(state, order.job))
        room = min(room, state.limits.pending_runs - len(state.waiting))
        if room <= 0:
            return None
        step = piece(state, change, room)
        return EndBackfill(_OWN, change.id, cancelled=False) if step is None else step
