"""Keeps in the state the rules of zones that something is planned in.

Owns the moment: before the first plan in a zone is proposed, and, for jobs from before rules were
kept, when a term begins. So each plan can be told from the state, by whoever leads later and with
whatever release of the zone database. Refuses to change the rules that a zone has: that is asked
for (api/_tzdata.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator

from tocsin_node.core import zones
from tocsin_node.core.command import SetZones
from tocsin_node.core.model import CalendarSpec, JobSpec, ZoneRules
from tocsin_node.leader.wake import repeat
from tocsin_node.replica import PROPOSE_TIMEOUT_S, Replica
from tocsin_node.schedule import ZoneDatabase

LOOK_S = 1.0  # between two looks while a member is of an older release
SCAN_JOBS = 2_000  # looked at between two turns of the event loop
COMMAND_BYTES = 32 * 1024  # of rules in one command, unless those of one zone are more


class ZoneKeeper:
    """Args:
    database: what is installed on this node.
    """

    def __init__(self, replica: Replica, database: ZoneDatabase) -> None:
        self._replica = replica
        self.database = database
        self._loop: asyncio.Task[None] | None = None

    def start(self, term: int) -> None:
        assert self._loop is None, f"term {term} began before the last one was over"
        self._loop = asyncio.ensure_future(self._run())

    async def stop(self) -> None:
        if self._loop is None:
            return
        loop, self._loop = self._loop, None
        loop.cancel()
        await asyncio.gather(loop, return_exceptions=True)

    async def know(
        self,
        specs: Iterable[JobSpec | CalendarSpec],
        *,
        timeout: float = PROPOSE_TIMEOUT_S,
    ) -> None:
        """Keeps the rules of zones that definitions name, unless it does already.

        Before every member understands how, nothing is kept, and plans follow what is installed.

        Raises:
            RaftError: nothing is known of it; it may be repeated.
        """
        state = self._replica.state
        if state.schema < SetZones.schema:
            return
        keys = {key for spec in specs for key in zones_of(spec) if key not in state.zones}
        if keys:
            await self.keep(sorted(keys), timeout=timeout)

    async def keep(self, keys: Iterable[str], *, timeout: float = PROPOSE_TIMEOUT_S) -> None:
        """Keeps the rules that zones have in the installed release."""
        found = (ZoneRules(key, self.database.release, self.database.rules(key)) for key in keys)
        for part in _parts(rules for rules in found if rules.data):
            await self._replica.execute(SetZones(part), timeout=timeout, reserved=True)

    async def _run(self) -> None:
        while self._replica.state.schema < SetZones.schema:  # noqa: ASYNC110 -- as in upgrade.py
            await asyncio.sleep(LOOK_S)
        task = asyncio.ensure_future(repeat(self._look_once, "zones"))
        try:
            await task
        finally:
            task.cancel()

    async def _look_once(self) -> None:
        """Finds what was planned before rules were kept; then there is nothing more to look for."""
        state = self._replica.state
        jobs = list(state.jobs.values())
        for at in range(0, len(jobs), SCAN_JOBS):
            await self.know(job.template for job in jobs[at : at + SCAN_JOBS])
            await asyncio.sleep(0)
        await self.know(calendar.spec for calendar in list(state.calendars.values()))
        await asyncio.Event().wait()


def zones_of(spec: JobSpec | CalendarSpec) -> Iterator[str]:
    """The zones by whose rules a definition is planned."""
    if isinstance(spec, CalendarSpec):
        key = zones.zone_of_calendar(spec)
        if key is not None:
            yield key
        return
    for schedule in spec.schedules:
        key = zones.zone_of(schedule)
        if key is not None:
            yield key


def _parts(found: Iterable[ZoneRules]) -> Iterator[tuple[ZoneRules, ...]]:
    part: list[ZoneRules] = []
    size_bytes = 0
    for rules in found:
        if part and size_bytes + len(rules.data) > COMMAND_BYTES:
            yield tuple(part)
            part, size_bytes = [], 0
        part.append(rules)
        size_bytes += len(rules.data)
    if part:
        yield tuple(part)
