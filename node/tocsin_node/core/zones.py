"""Whose rules time zones have: those of the release that the cluster plans with.

Owns which rules are kept, which of them a zone has now, and the beginning of a change of the
release. A definition names for each of its schedules the release that brought its zone's rules, so
whoever leads plans by the same rules, whatever is installed there, and an audit recomputes each
version by those of its time. Refuses to know what rules mean: they are bytes here.

Rules are kept of zones that something was planned in, and anew only where they differ: two or three
kilobytes each. Of a zone the newest `RULES_MAX` are kept; audits go back no further than those.
"""

from __future__ import annotations

from collections.abc import Container

from msgspec.structs import replace

from tocsin_node.core import wide
from tocsin_node.core.command import BeginTzdata, SetZones
from tocsin_node.core.model import (
    CalendarSpec,
    Job,
    JobSpec,
    Schedule,
    ScheduleKind,
    WideKind,
)
from tocsin_node.core.result import Applied, Reason, Rejected, Result
from tocsin_node.core.state import State

ZONES_MAX = 1_000  # the database has some 600
RULES_MAX = 4  # of one zone
RULES_BYTES_MAX = 64 * 1024  # of one zone in one release
FIXED = ("UTC", "Etc/UTC")  # whose rules do not change


def zone_of(schedule: Schedule) -> str | None:
    """The zone by whose rules a schedule is planned; None: no rules make a difference."""
    if schedule.kind is not ScheduleKind.CRON or schedule.time_zone in FIXED:
        return None
    return schedule.time_zone


def zone_of_calendar(spec: CalendarSpec) -> str | None:
    return None if spec.time_zone in FIXED else spec.time_zone


def with_rules(state: State, schedule: Schedule) -> Schedule:
    """A schedule as a new plan is made for it."""
    key = zone_of(schedule)
    return schedule if key is None else replace(schedule, rules=state.zones.get(key, ""))


def bare(schedule: Schedule) -> Schedule:
    """A schedule as its author wrote it."""
    if not schedule.rules:
        return schedule
    return replace(schedule, rules="", decided_s=(), late_s=(), mark_s=0, decided_by="")


def rules_before(state: State, key: str, release: str) -> str:
    """The release whose rules a zone had last, before those of another one; "" if none is kept."""
    kept = [named[1] for named in state.zone_rules if named[0] == key and named[1] != release]
    return kept[-1] if kept else ""


def refusal(state: State, spec: JobSpec) -> Rejected | None:
    """Why a definition that was planned on the leader cannot count; None when it can."""
    for schedule in spec.schedules if state.zones else ():
        key = zone_of(schedule)
        if key is not None and state.zones.get(key, "") != schedule.rules:
            return Rejected(Reason.STALE_PLAN, f"the rules of {key} changed meanwhile")
    return None


def calendar_refusal(state: State, spec: CalendarSpec) -> Rejected | None:
    """The same of a calendar; while rules change, calendars do not."""
    busy = next((one for one in state.wide_active.values() if one.kind is WideKind.TZDATA), None)
    if busy is not None:
        return _busy(busy.id, busy.done, busy.total)
    key = zone_of_calendar(spec) if state.zones else None
    if key is not None and state.zones.get(key, "") != spec.rules:
        return Rejected(Reason.STALE_PLAN, f"the rules of {key} changed meanwhile")
    return None


def set_zones(state: State, command: SetZones) -> Result:
    """Keeps rules. A zone without any has them from now on; others when a change begins."""
    for rules in command.rules:
        named = rules.key, rules.release
        if named in state.zone_rules or len(rules.data) > RULES_BYTES_MAX:
            continue
        if rules.key not in state.zones:
            if len(state.zones) >= ZONES_MAX:
                return Rejected(Reason.QUOTA_EXCEEDED, f"the cluster has {ZONES_MAX} time zones")
            state.zones[rules.key] = rules.release
        state.put_zone_rules(rules)
    return Applied()


def begin_tzdata(state: State, command: BeginTzdata) -> Result:
    """The answer is the wide change."""
    release = command.release
    if state.tzdata == release:
        return Applied(wide.latest(state, WideKind.TZDATA, release), repeated=True)
    if state.tzdata != command.before:
        return Rejected(Reason.STALE_PLAN, f"the cluster plans with {state.tzdata} by now")
    replanning = (one for one in state.wide_active.values() if one.kind is not WideKind.BACKFILL)
    if (busy := next(replanning, None)) is not None:
        return _busy(busy.id, busy.done, busy.total)
    if state.index in state.wide:
        # Its id would be that of another change that began in this very entry.
        return Rejected(Reason.STALE_PLAN, "another wide change began in the same entry")
    if any((key, release) not in state.zone_rules for key in command.zones):
        return Rejected(Reason.STALE_PLAN, f"not all rules of {release} are kept")
    state.tzdata = release
    for key in command.zones:
        state.zones[key] = release
        _forget(state, key)
    changed = dict.fromkeys(command.zones)
    for calendar in list(state.calendars.values()) if changed else ():
        if calendar.spec.time_zone in changed:
            # A version of its own, which the jobs that name it get as they get the new rules.
            spec = replace(calendar.spec, rules=release)
            state.put_calendar(replace(calendar, version=state.index, spec=spec))
    total = command.total if changed else 0
    return Applied(wide.begin(state, WideKind.TZDATA, release, total=total, walk=bool(changed)))


def waits_for_rules(state: State, job: Job, *, zones: Container[str], release: str) -> bool:
    """Whether a job is still planned by other rules than a release's in one of its zones.

    Args:
        zones: those whose rules the release changes.
    """
    spec = job.template
    for schedule in spec.schedules:
        is_cron = schedule.kind is ScheduleKind.CRON
        if is_cron and schedule.rules != release and schedule.time_zone in zones:
            return True
    for name, version in zip(spec.exclusions, spec.calendars, strict=True):
        planned = state.calendar_versions[name, version]
        if planned.time_zone in zones and planned.rules != release:
            return True
    return False


def _forget(state: State, key: str) -> None:
    """Drops the oldest of too many rules of a zone; never those that it has now."""
    kept = [named for named in state.zone_rules if named[0] == key]
    for named in kept[: max(0, len(kept) - RULES_MAX)]:
        if named[1] != state.zones[key]:
            state.drop_zone_rules(named)


def _busy(id_: int, done: int, total: int) -> Rejected:
    return Rejected(
        Reason.WIDE_CHANGE_IN_PROGRESS,
        f"another wide change has reached {done} of {total} jobs; try again when it is over",
        {"change": str(id_)},
    )
