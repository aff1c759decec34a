"""Wide changes: one decision about many jobs or runs, carried out in bounded entries.

Owns the record of each (what it is about, its planning instant, how far it has come), and the
question which change holds a job: one that has not reached it yet, so that the job must neither
fire nor be edited on its old plan. Whoever leads carries it on from the state (leader/wide.py), so
a change survives its leader; its record says how far it is. Refuses to find what a change is about:
the leader walks, a bounded piece at a time, and each step says in its own command what it does.

How another kind is added:

1. Give it a name in `WideKind`, and a command that begins it, whose handler calls `begin`; it names
   what the change is about in `subject`, such as the release of a database or a stored filter.
2. If a job that is not reached yet must not fire from its old instant, add the kind to `_HOLDS`: a
   function that says from the state and the job whether the job still waits for the change. It must
   turn false by the step, for instance because the job's version or something in its definition is
   newer. Changes hold a job in the order of their ids, and each step is about the first of them.
   The ticker and the edits then replan such a job on the spot, by the change's own step.
3. Add its walk to leader/wide.py: the names that it is about, in their order, and the command that
   does one step. Its handler calls `count` when it has dealt with one.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from tocsin_node.core.command import AdvanceWide, EndWide
from tocsin_node.core.model import Job, ScheduleKind, WideChange, WideKind
from tocsin_node.core.result import Applied, Reason, Rejected, Result
from tocsin_node.core.state import State

ENDED_MAX = 100  # changes that are over and still told of


def begin(
    state: State, kind: WideKind, subject: str, *, total: int, walk: bool = False
) -> WideChange:
    """Begins a wide change in the present entry, whose cluster time is its planning instant.

    Its id is the log index, so one entry begins at most one; a change of nothing is over at once.

    Args:
        walk: there may be more than the total says, so whoever leads has to look.
    """
    ended_ms = None if total or walk else state.time_ms
    change = WideChange(
        state.index, kind, subject, state.time_ms, total=total, end_time_ms=ended_ms
    )
    state.put_wide(change)
    _forget(state)
    return change


def holding(state: State, job: Job) -> WideChange | None:
    """The oldest change that is to replan a job and has not yet; None: the job's plan is valid."""
    for change in state.wide_active.values():
        holds = _HOLDS.get(change.kind)
        if holds is not None and holds(state, change, job):
            return change
    return None


def going_on(state: State, kind: WideKind, subject: str) -> WideChange | None:
    """The change of that kind and subject that is not over."""
    for change in state.wide_active.values():
        if (change.kind, change.subject) == (kind, subject):
            return change
    return None


def latest(state: State, kind: WideKind, subject: str) -> WideChange | None:
    """The newest change of that kind and subject that is known, over or not."""
    for change in reversed(state.wide.values()):
        if (change.kind, change.subject) == (kind, subject):
            return change
    return None


def settle_until_ms(change: WideChange, job: Job) -> int:
    """The planning instant for one job: what was decided already is not decided again.

    New rules of zones go on from the mark: whatever is open then is planned by them, see zones.py.
    """
    if change.kind is WideKind.TZDATA:
        return job.mark_time_ms
    return max(change.time_ms, job.mark_time_ms)


def calendars_after(state: State, change: WideChange, job: Job) -> tuple[int, ...]:
    """The calendar versions that a job is planned under once a change has reached it."""
    if change.kind is WideKind.TZDATA:
        return tuple(
            change.id if state.calendars[name].version == change.id else version
            for name, version in zip(job.template.exclusions, job.template.calendars, strict=True)
        )
    return tuple(
        change.id if name == change.subject else version
        for name, version in zip(job.template.exclusions, job.template.calendars, strict=True)
    )


def count(state: State, id_: int) -> None:
    """Notes that a change has dealt with one more job or run."""
    change = state.wide_active.get(id_)
    if change is not None:
        state.put_wide(replace(change, done=change.done + 1))


def advance(state: State, command: AdvanceWide) -> Result:
    change = state.wide_active.get(command.change)
    if change is None:
        return _over(command.change)
    if command.cursor > change.cursor:  # else an older leader's, or a repeat
        state.put_wide(replace(change, cursor=command.cursor))
    return Applied()


def end(state: State, command: EndWide) -> Result:
    change = state.wide_active.get(command.change)
    if change is None:
        return _over(command.change)
    state.put_wide(replace(change, end_time_ms=state.time_ms))
    _forget(state)
    return Applied()


def _forget(state: State) -> None:
    ended = [id_ for id_, change in state.wide.items() if change.end_time_ms is not None]
    for id_ in ended[: max(0, len(ended) - ENDED_MAX)]:
        state.drop_wide(id_)


def _over(id_: int) -> Rejected:
    return Rejected(Reason.STALE_PLAN, f"wide change {id_} is over")


def _calendar_holds(state: State, change: WideChange, job: Job) -> bool:
    """A calendar's version is the id of the change that brings it to its jobs."""
    spec = job.template
    if change.subject not in spec.exclusions or job.deleted:
        return False
    return spec.calendars[spec.exclusions.index(change.subject)] < change.id


def _tzdata_holds(state: State, change: WideChange, job: Job) -> bool:
    if job.deleted:
        return False
    spec, release = job.template, change.subject
    for schedule in spec.schedules:
        is_cron = schedule.kind is ScheduleKind.CRON
        if is_cron and schedule.rules != release == state.zones.get(schedule.time_zone):
            return True
    for name, version in zip(spec.exclusions, spec.calendars, strict=True):
        if version < change.id and state.calendars[name].version == change.id:
            return True
    return False


_HOLDS: dict[WideKind, Callable[[State, WideChange, Job], bool]] = {
    WideKind.CALENDAR: _calendar_holds,
    WideKind.TZDATA: _tzdata_holds,
}
