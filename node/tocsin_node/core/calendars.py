"""Exclusion calendars: which may be set and deleted, and which a definition may name.

Owns that a calendar is there as long as a job names it, and that changing one begins a wide change
of its jobs (wide.py). Refuses to know what a calendar excludes: the leader evaluates it, and each
decision carries what came of it.
"""

from __future__ import annotations

from msgspec.structs import replace

from tocsin_node.core import wide, zones
from tocsin_node.core.command import DeleteCalendar, SetCalendar
from tocsin_node.core.model import Calendar, JobSpec, WideKind
from tocsin_node.core.result import Applied, Reason, Rejected, Result
from tocsin_node.core.state import State

CALENDARS_MAX = 10_000  # in the cluster
EXCLUDED = "excluded"  # why the ledger says SKIPPED of what a calendar excludes


def refusal(state: State, spec: JobSpec) -> Rejected | None:
    """Why a definition that was planned on the leader cannot count; None when it can."""
    if not spec.exclusions:
        return None
    for name in spec.exclusions:
        if name not in state.calendars:
            return not_found(name)
    if state.current_calendars(spec) != spec.calendars:
        return Rejected(Reason.STALE_PLAN, "a calendar of the job changed meanwhile")
    return None


def not_found(name: str) -> Rejected:
    return Rejected(Reason.CALENDAR_NOT_FOUND, f"no calendar {name}", {"calendar": name})


def set_calendar(state: State, command: SetCalendar) -> Result:
    """Stores a calendar. The answer is the calendar as it is then."""
    if (refused := set_refusal(state, command)) is not None:
        return refused
    old = state.calendars.get(command.name)
    if old is None and command.name in state.changed_calendars:
        # Its version would be that of the calendar that was deleted in this very entry.
        return Rejected(Reason.STALE_PLAN, f"calendar {command.name} was deleted in the same entry")
    if state.index in state.wide:
        # Its id would be that of another change that began in this very entry.
        return Rejected(Reason.STALE_PLAN, "another wide change began in the same entry")
    calendar = Calendar(
        command.name, state.index, state.index, command.spec, state.time_ms, state.time_ms
    )
    if old is not None:
        calendar = replace(calendar, uid=old.uid, create_time_ms=old.create_time_ms)
    state.put_calendar(calendar)
    if jobs := state.calendar_jobs.get(command.name):
        wide.begin(state, WideKind.CALENDAR, command.name, total=len(jobs))
    return Applied(calendar)


def set_refusal(state: State, command: SetCalendar) -> Rejected | None:
    """Why a calendar cannot be stored, whatever else is in the entry."""
    old = state.calendars.get(command.name)
    if (old.version if old is not None else 0) != command.version:
        return Rejected(Reason.STALE_PLAN, f"calendar {command.name} changed meanwhile")
    if old is None and len(state.calendars) >= CALENDARS_MAX:
        return Rejected(Reason.QUOTA_EXCEEDED, f"the cluster holds {CALENDARS_MAX} calendars")
    if (busy := wide.going_on(state, WideKind.CALENDAR, command.name)) is not None:
        return Rejected(
            Reason.WIDE_CHANGE_IN_PROGRESS,
            f"the last change of calendar {command.name} has reached {busy.done} of "
            f"{busy.total} jobs; try again when it has reached all",
            {"calendar": command.name, "change": str(busy.id)},
        )
    return zones.calendar_refusal(state, command.spec)


def delete_calendar(state: State, command: DeleteCalendar) -> Result:
    if (refused := delete_refusal(state, command)) is not None:
        return refused
    state.drop_calendar(command.name)
    return Applied()


def delete_refusal(state: State, command: DeleteCalendar) -> Rejected | None:
    """Why a calendar cannot be deleted; None when it can."""
    old = state.calendars.get(command.name)
    if old is None:
        return not_found(command.name)
    if command.version not in (0, old.version):
        return Rejected(
            Reason.ETAG_MISMATCH,
            f"calendar {old.name} is at version {old.version}",
            {"current_etag": str(old.version)},
        )
    if jobs := state.calendar_jobs.get(command.name):
        return Rejected(
            Reason.CALENDAR_IN_USE,
            f"calendar {old.name} is named by {len(jobs)} jobs, {min(jobs)} among them",
            {"calendar": old.name, "count": str(len(jobs)), "job": min(jobs)},
        )
    return None
