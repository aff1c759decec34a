"""Writes into the log where cluster time comes from, and says in the node's log what is wrong.

Owns the moments when a leader's base changes after its term's first entry: a majority agrees at
last, or is followed forward, or an operator trusts one node. Refuses to keep time itself
(cluster_time.py) and to judge (fitness.py).
"""

from __future__ import annotations

import asyncio
import logging

from tocsin_node.core.command import ClockBase
from tocsin_node.fitness import Standing
from tocsin_node.leader.wake import Wake, repeat
from tocsin_node.replica import Replica

LOOK_MS = 1_000
# A measurement can be missing for a moment; what lasts for so many looks is told.
LOOKS_BEFORE_ALARM = 3

log = logging.getLogger(__name__)


class ClockKeeper:
    """Watches the clock of one replica while its node leads."""

    def __init__(self, replica: Replica, standing: Standing) -> None:
        self._replica = replica
        self._standing = standing
        self._wake = Wake()
        self._loop: asyncio.Task[None] | None = None
        self._logged = ("", "", 0)  # what the log of this term says: source, node, set forward
        self._seen: dict[str, int] = {}  # alarms, and at how many looks in a row

    def start(self, term: int) -> None:
        assert self._loop is None, f"term {term} began before the last one was over"
        base, clock = self._replica.state.base, self._replica.clock
        source = "" if base is None else base.source
        self._logged = (source, "", clock.stepped_ms)
        self._seen.clear()
        self._loop = asyncio.ensure_future(repeat(self._pass, "clock keeper"))

    async def stop(self) -> None:
        if self._loop is None:
            return
        loop, self._loop = self._loop, None
        loop.cancel()
        await asyncio.gather(loop, return_exceptions=True)

    async def _pass(self) -> None:
        clock = self._replica.clock
        clock.now_ms()  # a base may have been found since
        now = (str(clock.source), clock.trusted_node, clock.stepped_ms)
        base = self._replica.state.base
        if base is not None and (*now[:2], self._logged[2]) == (base.source, base.node_id, now[2]):
            self._logged = now
        if now != self._logged:
            source, node_id, stepped_ms = now
            forward_ms = stepped_ms - self._logged[2]
            if forward_ms:
                log.warning(
                    "cluster time was %g s behind the majority's clocks and is set forward",
                    forward_ms / 1_000,
                )
            else:
                log.warning("cluster time is known: source %s %s", source, node_id)
            await self._replica.execute(ClockBase(source, node_id, forward_ms), reserved=True)
            self._logged = now
        self._tell()
        await self._wake.wait(LOOK_MS)

    def _tell(self) -> None:
        alarms = self._standing.alarms(leads=True)
        for alarm in alarms:
            self._seen[alarm] = self._seen.get(alarm, 0) + 1
            if self._seen[alarm] == LOOKS_BEFORE_ALARM:
                log.error("alarm: %s", alarm)
        for gone in [alarm for alarm in self._seen if alarm not in alarms]:
            if self._seen.pop(gone) >= LOOKS_BEFORE_ALARM:
                log.warning("no longer: %s", gone)
