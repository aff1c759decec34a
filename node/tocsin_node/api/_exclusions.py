"""What calendars make of a job and of previewed times, in words. Reads and decides nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tocsin_node import planner
from tocsin_node.core import wide
from tocsin_node.core.model import (
    SECOND_MS,
    CalendarSpec,
    Job,
    JobSpec,
    OnExcluded,
    Schedule,
    utc_name,
)
from tocsin_node.core.state import State
from tocsin_node.schedule import exclusion_of, load_zone, local_text

FAR_MS = 600 * 366 * 24 * 3_600 * SECOND_MS  # beyond the end of all schedules


@dataclass(frozen=True, slots=True)
class Excluded:
    """What becomes of a nominal time that is excluded."""

    note: str
    moved_to_ms: int | None  # None: it is skipped


def note_of(state: State, job: Job) -> str:
    """Why a job's calendars, or a change of them, keep it from firing as its schedules say."""
    change = wide.holding(state, job) if state.wide_active else None
    if change is not None:
        return (
            f"it waits for the change of {change.kind} {change.subject}, which has reached "
            f"{change.done} of {change.total} jobs"
        )
    spec = job.template
    if job.paused or job.used_up or not (spec.schedules and spec.exclusions):
        return ""
    if job.next_time_ms is None:
        after_ms = max(job.mark_time_ms, state.time_ms)
        times = planner.nominal_times(
            job.template, anchor_time_ms=job.anchor_time_ms, after_ms=after_ms, until_ms=FAR_MS
        )
        if next(times, None) is None:
            return ""
        return "nothing is left: its calendars exclude every further time of its schedules"
    found = excluded(
        job.template.exclusions, state.calendars_of(job.template), job, job.next_time_ms
    )
    if found is None:
        return ""
    if found.moved_to_ms is None:
        return f"its next times are all excluded as far as was looked ahead: {found.note}"
    return f"its next time is moved: {found.note}"


def excluded(
    names: Sequence[str],
    calendars: Sequence[CalendarSpec],
    job: Job | OnExcluded,
    time_ms: int,
) -> Excluded | None:
    """What the calendars of a job say of one of its nominal times; None: they do not exclude it.

    Args:
        names: of the calendars, in their order.
        job: the job, or what it does with excluded times.
    """
    if not calendars:
        return None
    exclusion, time_s = exclusion_of(calendars), time_ms // SECOND_MS
    if not exclusion.excluded(time_s):
        return None
    reasons = "; ".join(f"{names[number]} ({rule})" for number, rule in exclusion.why(time_s))
    policy = job.template.on_excluded if isinstance(job, Job) else job
    if policy is OnExcluded.SKIP:
        return Excluded(f"excluded by {reasons}: skipped", None)
    allowed_s = exclusion.next_allowed(time_s)
    if allowed_s is None:
        return Excluded(f"excluded by {reasons}: skipped, as nothing is left to move it to", None)
    zone = load_zone(calendars[exclusion.why(time_s)[0][0]].time_zone)
    shown = local_text(zone, allowed_s)
    return Excluded(f"excluded by {reasons}: moved to {shown}", allowed_s * SECOND_MS)


def what_is_left(
    schedules: Sequence[Schedule],
    *,
    anchor_ms: int,
    names: Sequence[str],
    calendars: Sequence[CalendarSpec],
    policy: OnExcluded,
    after_ms: int,
) -> str:
    """A warning for a preview of nothing but skipped times: when, if ever, one will run."""
    spec = JobSpec(
        "preview", schedules=tuple(schedules), exclusions=tuple(names), on_excluded=policy
    )
    plan = planner.plan_after(
        "default/preview",
        spec,
        anchor_time_ms=anchor_ms,
        mark_time_ms=after_ms,
        calendars=tuple(calendars),
    )
    if plan.next_time_ms is None:
        return "nothing is left: the calendars exclude every further time"
    shown = utc_name(plan.next_time_ms)
    if excluded(names, calendars, policy, plan.next_time_ms) is not None:
        return f"all times shown are excluded, and so are those up to {shown} at least"
    return f"all times shown are excluded; the next one that is not is {shown}"
