"""What has come due and what comes next: the decisions that a leader puts into the log.

Owns the misfire policy and the settling of edits. It reads a job and its timetable at an instant
and gives back values; machine.py checks them against the state and says what the overlap policy
makes of each. Refuses to propose anything, and to look at the clock: the instant is an argument.
A job that names exclusion calendars is planned around them (excluded.py); `calendars` are those of
its definition, in its order (`State.calendars_of`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping

from msgspec.structs import replace

from tocsin_node.core import wide, zones
from tocsin_node.core.command import Decision, Plan, ReplanJob, ReplanZones, SettleJob
from tocsin_node.core.model import (
    SECOND_MS,
    CalendarSpec,
    Job,
    JobSpec,
    Misfire,
    Outcome,
    Schedule,
    ScheduleKind,
    WideKind,
)
from tocsin_node.core.state import State
from tocsin_node.excluded import COUNT_EXACT_MAX, Around
from tocsin_node.schedule import Timetable, jitter_ms, load_zone, moved, needs_anchor

DECISIONS_MAX = 100  # occurrences on time that one command decides; the next command goes on
SETTLE_MAX = 1_000  # occurrences on time that one edit decides; they travel in one log entry

TABLES_KEPT = 10_000  # definitions whose timetables are found by the object that they are

Calendars = tuple[CalendarSpec, ...]


class Backlog(Exception):
    """More occurrences are undecided than the entry of an edit can settle.

    Attributes:
        step: decides the oldest of them; when it has been applied, plan the edit again.
    """

    def __init__(self, message: str, step: SettleJob) -> None:
        super().__init__(message, step)
        self.step = step

    def __str__(self) -> str:
        return str(self.args[0])


def first(
    name: str, spec: JobSpec, now_ms: int, calendars: Calendars = ()
) -> tuple[tuple[Decision, ...], Plan]:
    """How a new job begins: strictly after now, but `at` times in the past run at once."""
    plan = plan_after(name, spec, anchor_time_ms=now_ms, mark_time_ms=now_ms, calendars=calendars)
    past_ms = past_times(spec, now_ms)
    if not past_ms:
        return (), plan
    if spec.exclusions:
        return Around(name, spec, now_ms, calendars).past(past_ms, now_ms), plan
    latest_ms = past_ms[-1]
    decision = Decision(
        occurrence_ms=latest_ms,
        due_time_ms=latest_ms + jitter_ms(name, spec.jitter_ms),
        late=latest_ms + spec.misfire_grace_ms < now_ms,
        behind_from_ms=past_ms[0],
        behind_to_ms=past_ms[max(len(past_ms) - 2, 0)],
        behind_count=len(past_ms) - 1,
    )
    return (decision,), plan


def past_times(spec: JobSpec, now_ms: int) -> list[int]:
    """The `at` times that are already past when a job is created, oldest first."""
    return sorted(
        {
            schedule.at_time_ms
            for schedule in spec.schedules
            if schedule.kind is ScheduleKind.AT and schedule.at_time_ms <= now_ms
        }
    )


def nominal_times(
    spec: JobSpec, *, anchor_time_ms: int, after_ms: int, until_ms: int
) -> Iterator[int]:
    """Every nominal time in (after_ms, until_ms] that a definition names, in order."""
    return _timetable(spec, anchor_time_ms).between(after_ms, until_ms)


def latest_time(spec: JobSpec, *, anchor_time_ms: int, after_ms: int, until_ms: int) -> int | None:
    """The newest nominal time in (after_ms, until_ms] that a definition names."""
    return _timetable(spec, anchor_time_ms).latest_at_or_before(until_ms, after_ms)


def due(job: Job, now_ms: int, calendars: Calendars = ()) -> tuple[tuple[Decision, ...], Plan]:
    """Decides the nominal times that are due now, the oldest first, at most a command's worth."""
    if job.template.exclusions:
        around = _around(job, calendars)
        decisions, mark_ms, _ = around.decide(
            job,
            until_ms=around.due_until_ms(job.mark_time_ms, now_ms),
            now_ms=now_ms,
            most=DECISIONS_MAX,
        )
        return decisions, around.plan_after(mark_ms)
    return _decide(job, until_ms=now_ms - _offset_ms(job), now_ms=now_ms, most=DECISIONS_MAX)


def settle(job: Job, now_ms: int, calendars: Calendars = ()) -> tuple[tuple[Decision, ...], Plan]:
    """Decides every nominal time up to now under the present definition, before it is changed.

    Those that are jittered into the future become runs that wait until they are due. What a pause
    has passed over is skipped: the definition that named it is about to go. The plan's mark is now.

    Raises:
        Backlog: there are more than `SETTLE_MAX`; take its step first.
    """
    decisions, plan, complete = _settle(job, now_ms, calendars, until_ms=now_ms)
    if not complete:
        step = SettleJob(job.name, job.uid, job.version, job.mark_time_ms, decisions, plan)
        raise Backlog(f"{job.name} has more than {SETTLE_MAX} occurrences to decide first", step)
    return decisions, plan_after(
        job.name,
        job.template,
        anchor_time_ms=job.anchor_time_ms,
        mark_time_ms=now_ms,
        calendars=calendars,
    )


def replan(state: State, job: Job, now_ms: int) -> ReplanJob | ReplanZones | None:
    """The next step of the oldest wide change that waits for a job; None: none does.

    What comes before its planning instant is decided under the old rules, also what is jittered or
    moved past it; where that is too much for one entry, the step is the first of several.
    """
    change = wide.holding(state, job)
    if change is None:
        return None
    if change.kind is WideKind.TZDATA:
        after = wide.calendars_after(state, change, job)
        calendars = state.calendars_of(replace(job.template, calendars=after))
        schedules, plan = by_rules(state, job, state.zones, calendars)
        named = job.name, job.uid, job.version, job.mark_time_ms
        return ReplanZones(change.id, *named, schedules, plan)
    until_ms = wide.settle_until_ms(change, job)
    calendars = state.calendars_of(job.template)
    decisions, plan, settled = _settle(job, now_ms, calendars, until_ms=until_ms)
    spec = replace(job.template, calendars=wide.calendars_after(state, change, job))
    if settled:
        plan = plan_after(
            job.name,
            spec,
            anchor_time_ms=job.anchor_time_ms,
            mark_time_ms=until_ms,
            calendars=state.calendars_of(spec),
        )
    return ReplanJob(
        change.id,
        job.name,
        job.uid,
        job.version,
        job.mark_time_ms,
        decisions,
        plan,
        settled,
        spec.calendars,
    )


def by_rules(
    state: State, job: Job, rules: Mapping[str, str], calendars: Calendars
) -> tuple[tuple[Schedule, ...], Plan]:
    """What becomes of a job when zones have other rules: it goes on from its mark.

    Args:
        rules: for each zone the release whose rules it is to have, see core/zones.py.
        calendars: those of its definition by these rules.
    """
    mark_ms = job.mark_time_ms
    schedules = tuple(_by_rules(state, one, rules, mark_ms) for one in job.template.schedules)
    plan = plan_after(
        job.name,
        replace(job.template, schedules=schedules),
        anchor_time_ms=job.anchor_time_ms,
        mark_time_ms=mark_ms,
        calendars=calendars,
    )
    return schedules, plan


def _by_rules(state: State, schedule: Schedule, rules: Mapping[str, str], mark_ms: int) -> Schedule:
    key = zones.zone_of(schedule)
    release = "" if key is None else rules.get(key, "")
    if key is None or release == schedule.rules:
        return schedule
    mark_s = mark_ms // SECOND_MS
    old = schedule.rules or zones.rules_before(state, key, release)
    decided_s, late_s = schedule.decided_s, schedule.late_s
    if schedule.decided_by and schedule.mark_s == mark_s:
        # Nothing has been decided since the last change, so it is as if that one had not been.
        old, decided_s, late_s = schedule.decided_by, (), ()
    new = load_zone(key, release)
    found = moved(schedule, load_zone(key, old), new, mark_s, decided_s=decided_s, late_s=late_s)
    return replace(
        schedule,
        rules=release,
        decided_s=found.decided_s,
        late_s=found.late_s,
        mark_s=mark_s if found.met else 0,
        decided_by=old if found.met else "",
    )


def _settle(
    job: Job, now_ms: int, calendars: Calendars, *, until_ms: int
) -> tuple[tuple[Decision, ...], Plan, bool]:
    """Decides what a job names up to an instant, at most an entry's worth, and whether it is all.

    The plan goes on from there under the same definition.
    """
    if job.paused or job.used_up:
        plan = Plan(job.mark_time_ms, job.next_time_ms, job.due_time_ms)
        return _passed_over(job, until_ms), plan, True
    if job.template.exclusions:
        around = _around(job, calendars)
        decisions, mark_ms, complete = around.decide(
            job, until_ms=until_ms, now_ms=now_ms, most=SETTLE_MAX
        )
        return decisions, around.plan_after(mark_ms), complete
    decisions, plan = _decide(job, until_ms=until_ms, now_ms=now_ms, most=SETTLE_MAX)
    return decisions, plan, plan.next_time_ms is None or plan.next_time_ms > until_ms


def resume(job: Job, now_ms: int, calendars: Calendars = ()) -> tuple[tuple[Decision, ...], Plan]:
    """Decides by the misfire policy what came due during a pause, and plans on from now.

    What is more than an entry can hold is left to the ticker, which goes on from the plan's mark.
    """
    if job.used_up:
        return settle(job, now_ms, calendars)
    running = replace(job, paused=False)
    decisions, plan, complete = _settle(running, now_ms, calendars, until_ms=now_ms)
    if not complete:
        return decisions, plan
    return decisions, plan_after(
        job.name,
        job.template,
        anchor_time_ms=job.anchor_time_ms,
        mark_time_ms=now_ms,
        calendars=calendars,
    )


def plan_after(
    name: str,
    spec: JobSpec,
    *,
    anchor_time_ms: int,
    mark_time_ms: int,
    calendars: Calendars = (),
) -> Plan:
    """The first nominal time strictly after a mark that is to run, and when it is due."""
    if spec.exclusions:
        return Around(name, spec, anchor_time_ms, calendars).plan_after(mark_time_ms)
    next_ms = _timetable(spec, anchor_time_ms).next_after(mark_time_ms)
    if next_ms is None:
        return Plan(mark_time_ms, None, None)
    return Plan(mark_time_ms, next_ms, next_ms + jitter_ms(name, spec.jitter_ms))


def needs_zones(spec: JobSpec) -> bool:
    """Whether planning such a job asks the time zone database, as calendars may do too."""
    return bool(spec.exclusions) or any(
        schedule.kind is ScheduleKind.CRON and schedule.time_zone not in zones.FIXED
        for schedule in spec.schedules
    )


def _decide(
    job: Job, *, until_ms: int, now_ms: int, most: int
) -> tuple[tuple[Decision, ...], Plan]:
    """Misfire first, then one decision for each occurrence on time.

    Args:
        until_ms: newest nominal time to decide.
        most: end after this many decisions, so that a long list is decided in several commands.
    """
    table = _timetable(job.template, job.anchor_time_ms)
    offset_ms = _offset_ms(job)
    late_until_ms = min(until_ms, now_ms - job.template.misfire_grace_ms - offset_ms - 1)
    decisions: list[Decision] = []
    mark_ms, next_ms = job.mark_time_ms, job.next_time_ms
    if next_ms is not None and next_ms <= late_until_ms:
        decisions, mark_ms = _misfired(job, table, late_until_ms, most)
        next_ms = table.next_after(mark_ms)
    while next_ms is not None and next_ms <= until_ms:
        if len(decisions) >= most:
            break
        decisions.append(Decision(next_ms, next_ms + offset_ms, next_ms in table.late_ms))
        mark_ms, next_ms = next_ms, table.next_after(next_ms)
    due_ms = None if next_ms is None else next_ms + offset_ms
    return tuple(decisions), Plan(mark_ms, next_ms, due_ms)


def _misfired(job: Job, table: Timetable, until_ms: int, most: int) -> tuple[list[Decision], int]:
    """What the misfire policy makes of the nominal times up to `until_ms`, and the last of them.

    Args:
        most: of the occurrences that run, leave those beyond so many to the next command, which
            finds them to be all that is left.
    """
    first_ms = job.next_time_ms
    last_ms = table.latest_at_or_before(until_ms, job.mark_time_ms)
    assert first_ms is not None, f"{job.name}: nothing is due"
    assert last_ms is not None, f"{job.name}: its next time is not in its timetable"
    offset_ms = _offset_ms(job)
    if job.template.misfire is Misfire.SKIP:
        missed = _behind(table, job.mark_time_ms, first_ms, last_ms, Outcome.MISSED)
        return [missed], last_ms
    kept = [last_ms]
    if job.template.misfire is Misfire.ALL:
        kept = newest_times(table, job.mark_time_ms, until_ms, job.template.catchup_limit)
        kept = kept[:most]
        last_ms = kept[-1]
    decisions = [Decision(time_ms, time_ms + offset_ms, late=True) for time_ms in kept]
    if kept[0] > first_ms:
        all_kept = job.template.misfire is Misfire.ALL
        outcome = Outcome.MISSED if all_kept else Outcome.COALESCED
        older_ms = table.latest_at_or_before(kept[0] - 1, job.mark_time_ms)
        assert older_ms is not None, f"{job.name}: nothing before {kept[0]}"
        behind = _behind(table, job.mark_time_ms, first_ms, older_ms, outcome)
        decisions[0] = Decision(
            kept[0],
            kept[0] + offset_ms,
            late=True,
            behind_from_ms=behind.behind_from_ms,
            behind_to_ms=behind.behind_to_ms,
            behind_count=behind.behind_count,
            behind_outcome=outcome,
        )
    return decisions, last_ms


def newest_times(table: Timetable, after_ms: int, until_ms: int, most: int) -> list[int]:
    """The newest nominal times in (after_ms, until_ms], at most so many, oldest first.

    Costs a few passes over about as many times, however long the span and whatever comes before.
    """
    span_ms = most * SECOND_MS
    few_ms, from_ms = until_ms, max(after_ms, until_ms - span_ms)
    while from_ms > after_ms and table.count_between(from_ms, until_ms, most)[0] < most:
        span_ms *= 2
        few_ms, from_ms = from_ms, max(after_ms, until_ms - span_ms)
    # Where they lay closer together before, there may now be very many.
    while few_ms - from_ms > SECOND_MS and not table.count_between(from_ms, until_ms, 4 * most)[1]:
        middle_ms = (from_ms + few_ms) // 2
        if table.count_between(middle_ms, until_ms, most)[0] < most:
            few_ms = middle_ms
        else:
            from_ms = middle_ms
    return list(deque(table.between(from_ms, until_ms), maxlen=most))


def _passed_over(job: Job, now_ms: int) -> tuple[Decision, ...]:
    """The nominal times that came and went while the job was paused or finished, as skipped."""
    table = _timetable(job.template, job.anchor_time_ms)
    last_ms = table.latest_at_or_before(now_ms, job.mark_time_ms)
    if last_ms is None:
        return ()
    first_ms = table.next_after(job.mark_time_ms)
    assert first_ms is not None, f"{job.name}: a last time without a first"
    reason = "max_runs" if job.used_up else ""
    skipped = _behind(table, job.mark_time_ms, first_ms, last_ms, Outcome.SKIPPED, reason=reason)
    return (skipped,)


def _behind(
    table: Timetable,
    mark_ms: int,
    first_ms: int,
    last_ms: int,
    outcome: Outcome,
    *,
    reason: str = "",
) -> Decision:
    count, _ = table.count_between(mark_ms, last_ms, COUNT_EXACT_MAX)
    return Decision(
        None,
        behind_from_ms=first_ms,
        behind_to_ms=last_ms,
        behind_count=count,
        behind_outcome=outcome,
        behind_reason=reason,
    )


def _around(job: Job, calendars: Calendars) -> Around:
    return Around(job.name, job.template, job.anchor_time_ms, calendars)


def _timetable(spec: JobSpec, anchor_time_ms: int) -> Timetable:
    """The timetable of a definition; most jobs share theirs, and so its answers.

    A definition is kept with its timetable, so an identity in the table means the same object.
    """
    kept = _tables.get(id(spec))
    if kept is not None and kept[2] in (None, anchor_time_ms):
        return kept[1]
    table = Timetable.build(spec.schedules, anchor_time_ms=anchor_time_ms)
    if len(_tables) >= TABLES_KEPT:
        _tables.clear()
    anchor_ms = anchor_time_ms if needs_anchor(spec.schedules) else None
    _tables[id(spec)] = spec, table, anchor_ms
    return table


_tables: dict[int, tuple[JobSpec, Timetable, int | None]] = {}


def _offset_ms(job: Job) -> int:
    return jitter_ms(job.name, job.template.jitter_ms)
