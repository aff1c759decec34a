"""What another release of the time zone database would move, and the change to it.

Owns the calls of `tocsin cluster tzdata`: who has which release, the plan, and that nothing is
applied before every member has it. What a plan says is what a step of the change does, since both
ask the planner. Refuses to move a fire itself: the wide change does (core/zones.py).
"""

from __future__ import annotations

import heapq
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field

from msgspec.structs import replace

from tocsin.v1 import cluster_pb2
from tocsin_node import admission, planner
from tocsin_node.admission import Faults, Refusal
from tocsin_node.api import _convert
from tocsin_node.api._pages import LOOK_EVERY, Page, Slices, decode_token, encode_token
from tocsin_node.core import wide, zones
from tocsin_node.core.command import BeginTzdata
from tocsin_node.core.model import (
    DAY_MS,
    SECOND_MS,
    CalendarSpec,
    Job,
    Schedule,
    WideChange,
    WideKind,
    release_order,
)
from tocsin_node.core.result import Reason
from tocsin_node.fitness import Standing
from tocsin_node.leader.zones import ZoneKeeper, zones_of
from tocsin_node.replica import Refused, Replica
from tocsin_node.schedule import (
    Timetable,
    first_difference_s,
    keep_rules,
    load_zone,
    local_text,
)

PAGE_SIZE_DEFAULT, PAGE_SIZE_MAX = 100, 1_000
PAGE_JOBS_MAX = 5_000  # planned for one page, however few of them move
AHEAD_MS = 2 * 366 * DAY_MS  # how far a plan looks for the first fire that moves
SORTED_PART = 5_000
BEGIN_TRIES = 5


@dataclass
class _Update:
    """What the installed release changes."""

    release: str
    changed: dict[str, str]  # by zone, the release whose rules it has now
    rules: Mapping[str, str]  # of each zone in use, as it will be
    # By calendar object: as it will be. Kept with the objects, so an identity means the same one.
    calendars: dict[int, tuple[CalendarSpec, CalendarSpec]] = field(default_factory=dict)

    def calendar(self, spec: CalendarSpec) -> CalendarSpec:
        if spec.time_zone not in self.changed:
            return spec
        kept = self.calendars.get(id(spec))
        if kept is None:
            kept = self.calendars[id(spec)] = spec, replace(spec, rules=self.release)
        return kept[1]


class Tzdata:
    """Serves from the leader's replica."""

    def __init__(
        self, replica: Replica, fitness: Standing, keeper: ZoneKeeper, slices: Slices
    ) -> None:
        self._replica = replica
        self._fitness = fitness
        self._keeper = keeper
        self._slices = slices

    async def status(self) -> cluster_pb2.GetTzdataResponse:
        state, pace = self._replica.state, self._slices.begin()
        count = 0
        for at, job in enumerate(list(state.jobs.values())):
            if at % LOOK_EVERY == 0:
                await pace.look()
            count += not job.deleted and planner.needs_zones(job.template)
        response = cluster_pb2.GetTzdataResponse(
            release=state.tzdata,
            leader_release=self._fitness.tzdata,
            zoned_job_count=count,
            zone_count=len(state.zones),
        )
        for node_id, release, reachable in self._fitness.releases():
            response.members.add(id=node_id, release=release, reachable=reachable)
        change = _last_change(self._replica)
        if change is not None:
            _convert.put_change(response.change, change)
        return response

    # -- the plan ----------------------------------------------------------------------------------

    async def preview(
        self, request: cluster_pb2.PreviewTzdataRequest
    ) -> cluster_pb2.PreviewTzdataResponse:
        faults = Faults()
        size = admission.page_size(
            request.page_size, faults, default=PAGE_SIZE_DEFAULT, most=PAGE_SIZE_MAX
        )
        faults.refuse_if_any()
        update = await self._update()
        state = self._replica.state
        parameters = ("PreviewTzdata", update.release)
        position = decode_token(request.page_token, *parameters)
        response = cluster_pb2.PreviewTzdataResponse(
            release=state.tzdata,
            new_release=update.release,
            changed_zones=sorted(update.changed),
        )
        page, pace = Page(size), self._slices.begin()
        looked_at, last = 0, ""
        async for name in self._concerned(update, position[1] if position else ""):
            job = state.job(name)
            if job is None:
                continue
            move = self._move(update, job)
            await pace.look()
            full = move is not None and not page.takes(move.ByteSize())
            if full or looked_at == PAGE_JOBS_MAX:
                response.next_page_token = encode_token((0, last), *parameters)
                break
            if move is not None:
                response.moves.append(move)
            looked_at, last = looked_at + 1, name
        return response

    async def _update(self) -> _Update:
        """What this node's release changes.

        Raises:
            Refusal: TZDATA_TOO_OLD.
        """
        state, database = self._replica.state, self._keeper.database
        if release_order(database.release) < release_order(state.tzdata):
            raise Refusal(
                "TZDATA_TOO_OLD",
                f"the leader has tzdata {database.release}, and the cluster plans with "
                f"{state.tzdata}; update it there, or move the leader to a node that has it",
            )
        pace, changed = self._slices.begin(), {}
        for key, release in list(state.zones.items()):
            data = database.rules(key)
            if data and data != state.zone_rules[key, release]:
                changed[key] = release
                keep_rules(key, database.release, data)
            await pace.look()
        rules = state.zones | dict.fromkeys(changed, database.release)
        return _Update(database.release, changed, rules)

    async def _concerned(self, update: _Update, after: str) -> AsyncIterator[str]:
        """The jobs after a name that have a zone whose rules change, in order."""
        if not update.changed:
            return
        state, pace = self._replica.state, self._slices.begin()
        parts: list[list[str]] = []
        part: list[str] = []
        for at, job in enumerate(list(state.jobs.values())):
            if at % LOOK_EVERY == 0:
                await pace.look()
            if job.name > after and _concerns(self._replica, job, update):
                part.append(job.name)
            if len(part) == SORTED_PART:
                parts.append(sorted(part))
                part = []
        for name in heapq.merge(*parts, sorted(part)):
            yield name

    def _move(self, update: _Update, job: Job) -> cluster_pb2.TzdataMove | None:
        """What the change moves first of a job; None: nothing in the next two years."""
        state, now_ms = self._replica.state, self._replica.clock.now_ms()
        calendars = tuple(map(update.calendar, state.calendars_of(job.template)))
        schedules, plan = planner.by_rules(state, job, update.rules, calendars)
        old_ms, new_ms = job.next_time_ms, plan.next_time_ms
        zone = next((key for key in zones_of(job.template) if key in update.changed), None)
        decided = sorted({time_s for one in schedules for time_s in one.decided_s})
        if old_ms == new_ms and not decided:
            found = self._later(update, job, schedules, now_ms)
            if found is None:
                return None
            zone, old_ms, new_ms = found
        if zone is None:  # of a calendar
            zone = next(one.time_zone for one in calendars if one.time_zone in update.changed)
        move = cluster_pb2.TzdataMove(job=job.name, time_zone=zone)
        if old_ms is not None:
            before = load_zone(zone, update.changed[zone])
            move.local_time = local_text(before, old_ms // SECOND_MS)
            _convert.put_time(move.old_time, old_ms)
        if new_ms is not None:
            move.local_new_time = local_text(load_zone(zone, update.release), new_ms // SECOND_MS)
            _convert.put_time(move.new_time, new_ms)
            move.late = new_ms <= now_ms and not job.paused
        for time_s in decided[:PAGE_SIZE_DEFAULT]:
            _convert.put_time(move.decided_time.add(), time_s * SECOND_MS)
        return move

    def _later(
        self, update: _Update, job: Job, schedules: tuple[Schedule, ...], now_ms: int
    ) -> tuple[str, int | None, int | None] | None:
        """The first fire after the next one that is moved: its zone, old and new instant."""
        after_ms = max(now_ms, job.mark_time_ms)
        for before, after in zip(job.template.schedules, schedules, strict=True):
            key = zones.zone_of(before)
            if key is None or key not in update.changed:
                continue
            at_s = first_difference_s(
                load_zone(key, before.rules or update.changed[key]),
                load_zone(key, update.release),
                after_ms // SECOND_MS,
                (after_ms + AHEAD_MS) // SECOND_MS,
            )
            if at_s is None:
                continue
            old_ms, new_ms = (
                Timetable.build([one], anchor_time_ms=job.anchor_time_ms).next_after(
                    (at_s - 1) * SECOND_MS
                )
                for one in (before, after)
            )
            if old_ms != new_ms:
                return key, old_ms, new_ms
        return None

    # -- the change --------------------------------------------------------------------------------

    async def apply(self, *, timeout: float) -> cluster_pb2.ApplyTzdataResponse:
        for left in reversed(range(BEGIN_TRIES)):
            # Also so that a leader that is none any more changes nothing.
            await self._replica.engine.confirm_leadership(timeout=timeout)
            update = await self._update()
            state = self._replica.state
            if state.tzdata != update.release:
                self._refuse_unless_everywhere(update.release)
            await self._keeper.keep(sorted(update.changed), timeout=timeout)
            command = BeginTzdata(
                state.tzdata,
                update.release,
                tuple(sorted(update.changed)),
                await self._count(update),
            )
            try:
                applied = await self._replica.execute(command, timeout=timeout)
            except Refused as refused:
                if refused.rejected.reason is not Reason.STALE_PLAN or not left:
                    raise
                continue
            response = cluster_pb2.ApplyTzdataResponse(
                release=update.release, repeated=applied.repeated
            )
            change = applied.value or _last_change(self._replica)
            if isinstance(change, WideChange):
                _convert.put_change(response.change, change)
            return response
        raise AssertionError("the last try was refused")

    def _refuse_unless_everywhere(self, release: str) -> None:
        behind = [
            (node_id, theirs if reachable else "")
            for node_id, theirs, reachable in self._fitness.releases()
            if not reachable or release_order(theirs) < release_order(release)
        ]
        if not behind:
            return
        words = [
            f"{node_id} has {theirs}" if theirs else f"{node_id} is not reachable"
            for node_id, theirs in behind
        ]
        raise Refusal(
            "TZDATA_NOT_EVERYWHERE",
            f"tzdata {release} is not on every node: {', '.join(words)}",
            detail={"nodes": ",".join(node_id for node_id, _ in behind), "release": release},
        )

    async def _count(self, update: _Update) -> int:
        pace, count = self._slices.begin(), 0
        for at, job in enumerate(list(self._replica.state.jobs.values())):
            if at % LOOK_EVERY == 0:
                await pace.look()
            count += _concerns(self._replica, job, update)
        return count


def _concerns(replica: Replica, job: Job, update: _Update) -> bool:
    if job.deleted or replica.state.jobs.get(job.name) is None:
        return False
    return zones.waits_for_rules(replica.state, job, zones=update.changed, release=update.release)


def _last_change(replica: Replica) -> WideChange | None:
    state = replica.state
    return wide.latest(state, WideKind.TZDATA, state.tzdata)
